/* Vercel's AI SDK by `@ai-sdk/openai-compatible`: chats. */
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embed } from "ai";
import { main, raised } from "./cells.mjs";
import { cellsOf } from "./vercel.mjs";

const provider = (server) =>
  createOpenAICompatible({ name: "quire", baseURL: server.v1, apiKey: server.key, includeUsage: true, supportsStructuredOutputs: true });

await main({
  ...cellsOf((server) => provider(server)(server.model), { quire: { reasoningEffort: "low" } }),

  async embeddings(server) {
    await raised(404, embed({ model: provider(server).embeddingModel(server.model), value: "a", maxRetries: 0 }), "embeddings");
  },
});
