"""Stream a chat with langchain-openai; print each piece as a line of JSON."""

import json
import sys

from langchain_openai import ChatOpenAI

url, prompt, num_tokens = sys.argv[1:]
model = ChatOpenAI(model="small", base_url=url, api_key="-", temperature=0.0, max_tokens=int(num_tokens), max_retries=0)
for chunk in model.stream(prompt):
    print(json.dumps(chunk.content), flush=True)
