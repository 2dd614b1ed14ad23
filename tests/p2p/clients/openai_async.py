"""Stream a completion with OpenAI's asynchronous client; print each piece as a line of JSON."""

import asyncio
import json
import sys

import openai


async def main(url: str, prompt: str, num_tokens: str) -> None:
    """Print the text."""
    async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0) as client:
        stream = await client.completions.create(
            model="small", prompt=prompt, temperature=0.0, max_tokens=int(num_tokens), stream=True
        )
        async for chunk in stream:
            print(json.dumps(chunk.choices[0].text), flush=True)


asyncio.run(main(*sys.argv[1:]))
