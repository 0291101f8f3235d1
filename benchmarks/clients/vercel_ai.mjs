/* Vercel's AI SDK against `quire serve`, by `/v1/responses`: text, a stream, a tool loop, a form.

    npm install ai @ai-sdk/openai zod
    quire serve --port 8000 &
    node benchmarks/clients/vercel_ai.mjs http://127.0.0.1:8000/v1
*/
import assert from "node:assert";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const openai = createOpenAI({ baseURL: process.argv[2], apiKey: "none" });
const model = openai.responses("quire-tiny");
const asked = { model, temperature: 0, maxOutputTokens: 24, maxRetries: 0 };

const said = await generateText({ ...asked, instructions: "Be short.", prompt: "What is a list?" });
console.log("text:", said.text, said.finishReason, said.usage.inputTokens);
assert(said.text);

const streamed = streamText({ ...asked, instructions: "Be short.", prompt: "What is a list?" });
let text = "";
for await (const piece of streamed.textStream) text += piece;
assert.equal(text, said.text);
console.log("stream:", text);

const messages = [{ role: "user", content: "What is a list?" }, ...said.response.messages, { role: "user", content: "Go on" }];
const more = await generateText({ ...asked, instructions: "Be short.", messages });
console.log("second turn (items by reference), input tokens:", more.usage.inputTokens);
assert(more.usage.inputTokens > said.usage.inputTokens);

const calls = [];
const now = tool({
  description: "Tell the time.",
  inputSchema: z.object({ zone: z.number().int().min(0).max(9) }),
  execute: async ({ zone }) => (calls.push(zone), "noon"),
});
const told = await generateText({
  ...asked, maxOutputTokens: 80, prompt: "Time?", tools: { now }, stopWhen: stepCountIs(2),
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" }),
});
console.log("tool:", calls, told.steps.length, "steps,", told.text);
assert.equal(told.steps.length, 2);

const form = await generateText({ ...asked, maxOutputTokens: 200, prompt: "Ok?", output: Output.object({ schema: z.object({ ok: z.boolean() }) }) });
console.log("form:", form.output);
