/* Vercel's AI SDK by `@ai-sdk/anthropic`: `/v1/messages`. */
import { createAnthropic } from "@ai-sdk/anthropic";
import { main } from "./cells.mjs";
import { cellsOf } from "./vercel.mjs";

const cells = cellsOf((server) => createAnthropic({ baseURL: server.v1, apiKey: server.key })(server.model));

await main({ ...cells, messages: cells.chat });
