/* Anthropic's SDK for JavaScript, by `/v1/messages`. */
import Anthropic from "@anthropic-ai/sdk";
import assert from "node:assert";
import { main, PARAMETERS, raised, SCHEMA, SYSTEM, TALK } from "./cells.mjs";

const TOOLS = [{ name: "now", description: "Tells the time.", input_schema: PARAMETERS }];
const USER = [{ role: "user", content: TALK }];

const client = (server) => new Anthropic({ baseURL: server.url, apiKey: server.key, maxRetries: 0 });
const asked = (server, given) => ({ model: server.model, max_tokens: 16, system: SYSTEM, messages: USER, temperature: 0, ...given });
const ask = (server, given = {}) => client(server).messages.create(asked(server, given));

async function messages(server) {
  const said = await ask(server);
  assert.equal(said.stop_reason, "max_tokens");
  const turns = [...USER, { role: "assistant", content: said.content }, { role: "user", content: "And a tuple?" }];
  assert((await ask(server, { messages: turns })).content[0].text);
}

await main({
  messages,
  chat: messages,

  async stream(server) {
    const said = (await ask(server)).content[0].text;
    const stream = client(server).messages.stream(asked(server));
    let text = "";
    stream.on("text", (piece) => { text += piece; });
    assert.equal(await stream.finalText(), said);
    assert.equal(text, said);
  },

  async tools(server) {
    const given = { tools: TOOLS, max_tokens: 120, tool_choice: { type: "any" } };
    const said = await ask(server, given);
    const [call] = said.content;
    assert(["UTC", "CET"].includes(call.input.zone));
    const result = { type: "tool_result", tool_use_id: call.id, content: [{ type: "text", text: "noon" }] };
    const turns = [...USER, { role: "assistant", content: said.content }, { role: "user", content: [result] }];
    assert((await ask(server, { messages: turns, tools: TOOLS })).content[0].text);
    const final = await client(server).messages.stream(asked(server, given)).finalMessage();
    assert.deepEqual(final.content[0].input, call.input);
  },

  async forced_tool(server) {
    const said = await ask(server, { tools: TOOLS, max_tokens: 120, tool_choice: { type: "tool", name: "now" } });
    assert.equal(said.content[0].name, "now");
  },

  async json_schema(server) {
    const said = await ask(server, { output_config: { format: { type: "json_schema", schema: SCHEMA } } });
    assert.equal(typeof JSON.parse(said.content[0].text).ok, "boolean");
  },

  async stop(server) {
    const text = (await ask(server)).content[0].text;
    const said = await ask(server, { stop_sequences: [text.slice(4, 7)] });
    assert.equal(said.stop_sequence, text.slice(4, 7));
  },

  async cancel(server) {
    await server.cancelled(async () => {
      const stream = client(server).messages.stream(asked(server, { max_tokens: 1500 }));
      for await (const _ of stream) break;
      stream.abort();
    });
  },

  async count_tokens(server) {
    const counted = await client(server).messages.countTokens({ model: server.model, messages: USER, system: SYSTEM });
    const { usage } = await ask(server);
    assert.equal(counted.input_tokens, usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens);
  },

  async reasoning(server) {
    const thinks = { thinking: { type: "enabled", budget_tokens: 16 } };
    const { thinking } = (await ask(server, thinks)).content[0];
    assert(thinking);
    const final = await client(server).messages.stream(asked(server, thinks)).finalMessage();
    assert.equal(final.content[0].thinking, thinking);
  },

  async errors(server) {
    await raised(Anthropic.AuthenticationError, ask(server.with("no-such-key")));
    await raised(Anthropic.NotFoundError, ask(server, { model: "none" }), "none");
    await raised(Anthropic.BadRequestError, ask(server, { temperature: -1 }), "temperature");
    await server.whenFull(() => raised(Anthropic.RateLimitError, ask(server)));
  },

  async usage(server) {
    await ask(server);
    assert((await ask(server)).usage.cache_read_input_tokens > 0);
  },
});
