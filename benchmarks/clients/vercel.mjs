/* The cells of Vercel's AI SDK, for each of its providers. */
import { generateText, jsonSchema, Output, stepCountIs, streamText, tool } from "ai";
import assert from "node:assert";
import { PARAMETERS, raised, SCHEMA, SYSTEM, TALK } from "./cells.mjs";

/* Return the cells of a provider; `model` makes a model for a server, and `thinks` are its options for reasoning. */
export function cellsOf(model, thinks) {
  const options = (server) => ({ model: model(server), temperature: 0, maxOutputTokens: 16, maxRetries: 0 });
  const ask = (server, given) => generateText({ ...options(server), instructions: SYSTEM, prompt: TALK, ...given });
  const now = (calls) => tool({
    description: "Tells the time.", inputSchema: jsonSchema(PARAMETERS), execute: ({ zone }) => (calls.push(zone), "noon"),
  });
  const streamed = async (result) => {
    let text = "";
    for await (const part of result.fullStream) {
      if (part.type === "error") throw part.error;
      if (part.type === "text-delta") text += part.text;
    }
    return text;
  };
  const reasoning = async (server) => {
    const { reasoningText } = await ask(server, { temperature: undefined, providerOptions: thinks });
    assert(reasoningText);
  };
  return {
    ...(thinks && { reasoning }),

    async chat(server) {
      const said = await ask(server);
      assert(said.text);
      assert.equal(said.finishReason, "length");
      const messages = [{ role: "user", content: TALK }, ...said.response.messages, { role: "user", content: "And a tuple?" }];
      const more = await ask(server, { prompt: undefined, messages });
      assert(more.text && more.usage.inputTokens > said.usage.inputTokens);
    },

    async stream(server) {
      const said = await ask(server);
      const result = streamText({ ...options(server), instructions: SYSTEM, prompt: TALK });
      assert.equal(await streamed(result), said.text);
      assert.equal((await result.usage).outputTokens, 16);
    },

    async tools(server) {
      const calls = [];
      const asked = { prompt: TALK, maxOutputTokens: 120, stopWhen: stepCountIs(2), tools: { now: now(calls) } };
      const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" });
      const said = await ask(server, { ...asked, prepareStep });
      assert.deepEqual(said.steps.map((each) => each.finishReason), ["tool-calls", said.finishReason]);
      assert(said.text);
      const result = streamText({ ...options(server), ...asked, prepareStep });
      assert(await streamed(result));
      assert.equal(calls.length, 2);
    },

    async forced_tool(server) {
      const calls = [];
      const toolChoice = { type: "tool", toolName: "now" };
      const said = await ask(server, { maxOutputTokens: 120, tools: { now: now(calls) }, toolChoice });
      assert.equal(said.toolCalls[0].toolName, "now");
    },

    async json_schema(server) {
      const output = Output.object({ schema: jsonSchema(SCHEMA) });
      const said = await ask(server, { maxOutputTokens: 120, output });
      assert.equal(typeof said.output.ok, "boolean");
    },

    async stop(server) {
      const { text } = await ask(server);
      const said = await ask(server, { stopSequences: [text.slice(4, 7)] });
      assert.equal(said.text, text.slice(0, text.indexOf(text.slice(4, 7))));
    },

    async cancel(server) {
      await server.cancelled(async () => {
        const gone = new AbortController(), stops = { maxOutputTokens: 1500, abortSignal: gone.signal };
        const result = streamText({ ...options(server), prompt: TALK, ...stops });
        for await (const _ of result.textStream) break;
        gone.abort();
      });
    },

    async errors(server) {
      await raised(401, ask(server.with("no-such-key")));
      await raised(400, ask(server, { prompt: TALK.repeat(3000) }));
      await server.whenFull(() => raised(429, ask(server)));
    },

    async usage(server) {
      await ask(server);
      const { usage } = await ask(server);
      assert(usage.inputTokenDetails.cacheReadTokens > 0);
    },
  };
}
