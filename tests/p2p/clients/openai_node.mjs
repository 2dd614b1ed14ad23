// Streams a chat by OpenAI's client for Node.js; prints each piece as a line of JSON.
import OpenAI from "openai";

const [url, prompt, numTokens] = process.argv.slice(2);
const client = new OpenAI({ baseURL: url, apiKey: "-", maxRetries: 0 });
const stream = await client.chat.completions.create({
  model: "small",
  messages: [{ role: "user", content: prompt }],
  temperature: 0,
  max_completion_tokens: Number(numTokens),
  stream: true,
  stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  for (const choice of chunk.choices) console.log(JSON.stringify(choice.delta.content ?? null));
  if (chunk.usage) console.error(`completion tokens: ${chunk.usage.completion_tokens}`);
}
