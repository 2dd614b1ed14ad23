"""Write a text with a model that other machines serve: python write.py 203.0.113.7:31337/12D3... "Once upon a time"."""

import sys

from transformers import TextStreamer

import lightning_swarm


def main() -> None:
    """Write, as the tokens come."""
    address, prompt = sys.argv[1:]
    model = lightning_swarm.remote_model(address)
    tokenizer = model.swarm.tokenizer()
    tokens = tokenizer(prompt, return_tensors="pt")
    model.generate(**tokens, max_new_tokens=24, do_sample=False, streamer=TextStreamer(tokenizer))
    model.swarm.close()


if __name__ == "__main__":
    main()
