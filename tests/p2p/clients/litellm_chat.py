"""Stream a chat with LiteLLM; print each piece as a line of JSON."""

import json
import sys

import litellm

url, prompt, num_tokens = sys.argv[1:]
stream = litellm.completion(
    model="openai/small",
    api_base=url,
    api_key="-",
    messages=[{"role": "user", "content": prompt}],
    temperature=0.0,
    max_tokens=int(num_tokens),
    stream=True,
    num_retries=0,
)
for chunk in stream:
    print(json.dumps(chunk.choices[0].delta.content), flush=True)
