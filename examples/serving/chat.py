"""Chat with a served model by OpenAI's client: python chat.py http://127.0.0.1:8000/v1 llama."""

import sys
from typing import Any

from openai import OpenAI


def main() -> None:
    """Read lines from standard input, and answer each as it comes."""
    url, model = sys.argv[1:]
    client, said = OpenAI(base_url=url, api_key="-"), list[Any]()
    for line in sys.stdin:
        said.append({"role": "user", "content": line.strip()})
        answer = ""
        for part in client.chat.completions.create(
            model=model, messages=said, max_tokens=24, temperature=0.0, stream=True
        ):
            piece = part.choices[0].delta.content or ""
            print(piece, end="", flush=True)
            answer += piece
        print()
        said.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main()
