/* Vercel's AI SDK by `@ai-sdk/anthropic`: `/v1/messages`. */
import { createAnthropic } from "@ai-sdk/anthropic";
import { main } from "./cells.mjs";
import { cellsOf } from "./vercel.mjs";

const provider = (server) => createAnthropic({ baseURL: server.v1, apiKey: server.key });
const thinks = { anthropic: { thinking: { type: "enabled", budgetTokens: 16 } } };
const cells = cellsOf((server) => provider(server)(server.model), thinks);

await main({ ...cells, messages: cells.chat });
