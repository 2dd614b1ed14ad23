"""Stream a chat with OpenAI's client; print each piece as a line of JSON."""

import json
import sys

import openai

url, prompt, num_tokens = sys.argv[1:]
client = openai.OpenAI(base_url=url, api_key="-", max_retries=0)
stream = client.chat.completions.create(
    model="small",
    messages=[{"role": "user", "content": prompt}],
    temperature=0.0,
    max_tokens=int(num_tokens),
    stream=True,
)
for chunk in stream:
    print(json.dumps(chunk.choices[0].delta.content), flush=True)
