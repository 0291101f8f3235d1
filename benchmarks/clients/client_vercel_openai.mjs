/* Vercel's AI SDK by `@ai-sdk/openai`: `/v1/responses`, and chats. */
import { createOpenAI } from "@ai-sdk/openai";
import { embed, generateText } from "ai";
import assert from "node:assert";
import { main, raised, SYSTEM, TALK } from "./cells.mjs";
import { cellsOf } from "./vercel.mjs";

const provider = (server) => createOpenAI({ baseURL: server.v1, apiKey: server.key });
const responses = cellsOf((server) => provider(server).responses(server.model));
const chats = cellsOf((server) => provider(server).chat(server.model));
const cells = Object.fromEntries(
  Object.entries(responses).map(([name, cell]) => [name, async (server) => { await chats[name](server); await cell(server); }]),
);
const asked = { temperature: 0, maxOutputTokens: 16, maxRetries: 0 };

await main({
  ...cells,
  stop: chats.stop,  // responses have no stop sequences
  responses: responses.chat,

  async previous_response(server) {
    const model = provider(server).responses(server.model);
    const first = await generateText({ ...asked, model, prompt: SYSTEM + TALK });
    const { responseId } = first.providerMetadata.openai;
    const providerOptions = { openai: { previousResponseId: responseId } };
    const second = await generateText({ ...asked, model, prompt: "And a tuple?", providerOptions });
    assert(second.usage.inputTokens > first.usage.totalTokens);
  },

  async logprobs(server) {
    const providerOptions = { openai: { logprobs: 3 } };
    const said = await generateText({ ...asked, model: provider(server).chat(server.model), prompt: TALK, providerOptions });
    assert(said.providerMetadata.openai.logprobs.length > 0);
  },

  async embeddings(server) {
    await raised(404, embed({ model: provider(server).embedding(server.model), value: "a", maxRetries: 0 }), "embeddings");
  },
});
