// Has a model call a tool and write JSON, by OpenAI's client for Node.js and Vercel's AI SDK, whole and streamed.
// Prints a line of JSON for each way: the arguments of all calls, or the objects.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const [url, schema] = process.argv.slice(2);
const parameters = JSON.parse(schema);
const trip = z.object({ city: z.enum(["Oslo", "Rome"]), days: z.number().int() });
const client = new OpenAI({ baseURL: url, apiKey: "-", maxRetries: 0 });
const asked = { model: "tiny", messages: [{ role: "user", content: "Go" }], max_tokens: 400, seed: 3 };
const print = (found) => console.log(JSON.stringify(found));

for (const stream of [false, true]) {
  const called = [];
  const book = (given) => {
    called.push(given);
    return "booked";
  };
  const own = { name: "book", description: "Book.", function: book, parse: JSON.parse, parameters, strict: true };
  const tools = [{ type: "function", function: own }];
  const runner = client.chat.completions.runTools({ ...asked, tools, stream }, { maxChatCompletions: 3 });
  await runner.done();
  print([called, runner.messages.filter(({ role }) => role === "tool").length]);
}
const book = [zodFunction({ name: "book", parameters: trip })];
const streamed = client.chat.completions.stream({ ...asked, tools: book, tool_choice: "required" });
const calls = (await streamed.finalChatCompletion()).choices[0].message.tool_calls;
print(calls.map((call) => call.function.parsed_arguments));
const parsed = await client.chat.completions.parse({ ...asked, response_format: zodResponseFormat(trip, "trip") });
print([parsed.choices[0].message.parsed]);

const provider = createOpenAICompatible({ name: "swarm", baseURL: url, supportsStructuredOutputs: true });
const model = provider("tiny");
const own = { book: tool({ description: "Book.", inputSchema: trip, execute: () => "booked" }) };
const options = { model, prompt: "Go", maxOutputTokens: 400, maxRetries: 0, seed: 3 };
const loop = { ...options, tools: own, stopWhen: stepCountIs(3) };
for (const write of [generateText, streamText]) {
  const written = await write(loop);
  const results = (await written.steps).map((step) => step.toolResults);
  print([results.flat().map(({ input }) => input), results.flat().length]);
}
print([(await generateObject({ ...options, schema: trip })).object]);
