/* OpenAI's SDK for JavaScript, by all of its APIs that the server has. */
import assert from "node:assert";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { CALL, main, PARAMETERS, raised, SCHEMA, SYSTEM, TALK } from "./cells.mjs";

const TOOL = { name: "now", description: "Tells the time.", parameters: PARAMETERS, strict: true };
const TOOLS = [{ type: "function", function: TOOL }];
const FLAT = [{ type: "function", ...TOOL }];
const USER = [{ role: "user", content: TALK }];
const MESSAGES = [{ role: "system", content: SYSTEM }, ...USER];

const client = (server) => new OpenAI({ baseURL: server.v1, apiKey: server.key, maxRetries: 0 });
const ask = (server, given = {}, options = {}) =>
  client(server).chat.completions.create({ model: server.model, messages: MESSAGES, temperature: 0, max_tokens: 16, ...given }, options);

await main({
  async chat(server) {
    const said = await ask(server);
    assert(said.choices[0].message.content);
    const parts = [{ role: "system", content: [{ type: "text", text: SYSTEM }] }, ...USER];
    const again = await ask(server, { messages: parts, max_tokens: null, max_completion_tokens: 16, stop: null });
    assert.equal(again.choices[0].message.content, said.choices[0].message.content);
    const turns = [...USER, said.choices[0].message, { role: "user", content: "And a tuple?" }];
    assert((await ask(server, { messages: turns })).choices[0].message.content);
    const models = await client(server).models.list();
    assert.deepEqual(models.data.map((each) => each.id), [server.model]);
  },

  async stream(server) {
    const said = (await ask(server)).choices[0].message.content;
    const chunks = [];
    for await (const chunk of await ask(server, { stream: true, stream_options: { include_usage: true } })) chunks.push(chunk);
    assert.equal(chunks.map((each) => each.choices[0]?.delta.content ?? "").join(""), said);
    assert(chunks.at(-1).usage.total_tokens);
    assert.equal(chunks.filter((each) => each.choices[0]?.finish_reason).length, 1);
    const helper = client(server).chat.completions.stream({ model: server.model, messages: MESSAGES, temperature: 0, max_tokens: 16 });
    assert.equal(await helper.finalContent(), said);
  },

  async tools(server) {
    const asked = { messages: USER, tools: TOOLS, max_tokens: 120, structured_outputs: { regex: CALL } };
    const { message, finish_reason } = (await ask(server, asked)).choices[0];
    assert.equal(finish_reason, "tool_calls");
    const [call] = message.tool_calls;
    const turns = [...USER, message, { role: "tool", tool_call_id: call.id, content: "noon" }];
    assert((await ask(server, { messages: turns, tools: TOOLS })).choices[0].message.content);
    const called = [];
    const run = (zone) => (called.push(zone), "noon");
    const forced = { type: "function", function: { name: "now" } };
    const runner = client(server).chat.completions.runTools({
      model: server.model, messages: USER, temperature: 0, max_tokens: 120, tool_choice: forced, stream: true,
      tools: [{ type: "function", function: { ...TOOL, parse: JSON.parse, function: run } }],
    });
    await runner.finalFunctionToolCallResult();
    assert(["UTC", "CET"].includes(called[0].zone));
  },

  async forced_tool(server) {
    for (const tool_choice of ["required", { type: "function", function: { name: "now" } }]) {
      const said = await ask(server, { tools: TOOLS, tool_choice, max_tokens: 120 });
      assert(["UTC", "CET"].includes(JSON.parse(said.choices[0].message.tool_calls[0].function.arguments).zone));
    }
  },

  async json_schema(server) {
    const response_format = zodResponseFormat(z.object({ ok: z.boolean() }), "ok");
    const said = await client(server).chat.completions.parse({ model: server.model, messages: USER, response_format });
    assert.equal(typeof said.choices[0].message.parsed.ok, "boolean");
    const format = { type: "json_schema", json_schema: { name: "ok", strict: true, schema: SCHEMA } };
    const plain = await ask(server, { response_format: format });
    assert.equal(typeof JSON.parse(plain.choices[0].message.content).ok, "boolean");
  },

  async stop(server) {
    const text = (await ask(server)).choices[0].message.content;
    const said = await ask(server, { stop: [text.slice(4, 7)] });
    assert.equal(said.choices[0].message.content, text.slice(0, text.indexOf(text.slice(4, 7))));
  },

  async cancel(server) {
    await server.cancelled(async () => {
      const stream = await ask(server, { stream: true, max_tokens: 1500, ignore_eos: true });
      for await (const _ of stream) break;
    });
    await server.cancelled(async () => {
      const gone = new AbortController();
      const asked = ask(server, { max_tokens: 1500, min_tokens: 1500, ignore_eos: true }, { signal: gone.signal });
      setTimeout(() => gone.abort(), 200);
      await raised(OpenAI.APIUserAbortError, asked);
    });
  },

  async n(server) {
    const said = await ask(server, { n: 2, temperature: 1 });
    assert.deepEqual(said.choices.map((each) => each.index), [0, 1]);
  },

  async logprobs(server) {
    const { content } = (await ask(server, { logprobs: true, top_logprobs: 3 })).choices[0].logprobs;
    assert(content.every((each) => each.top_logprobs.length === 3));
  },

  async responses(server) {
    const asked = { model: server.model, input: TALK, instructions: SYSTEM, temperature: 0, max_output_tokens: 16 };
    const said = await client(server).responses.create(asked);
    assert.equal(said.output_text, (await ask(server)).choices[0].message.content);
    let text = "";
    for await (const event of client(server).responses.stream(asked))
      if (event.type === "response.output_text.delta") text += event.delta;
    assert.equal(text, said.output_text);
    const called = await client(server).responses.create({ ...asked, tools: FLAT, tool_choice: "required", max_output_tokens: 60 });
    const output = { type: "function_call_output", call_id: called.output[0].call_id, output: "noon" };
    const told = await client(server).responses.create({ ...asked, input: [...USER, ...called.output, output], tools: FLAT });
    assert(told.output_text);
    await raised(OpenAI.BadRequestError, client(server).responses.create({ ...asked, background: true }), "background");
  },

  async previous_response(server) {
    const asked = { model: server.model, max_output_tokens: 16 };
    const said = await client(server).responses.create({ ...asked, input: SYSTEM + TALK });
    const more = await client(server).responses.create({ ...asked, input: "And a tuple?", previous_response_id: said.id });
    assert(more.usage.input_tokens_details.cached_tokens > 0);
  },

  async count_tokens(server) {
    const counted = await client(server).responses.inputTokens.count({ model: server.model, input: TALK });
    assert(counted.input_tokens > 0);
  },

  async embeddings(server) {
    await raised(OpenAI.NotFoundError, client(server).embeddings.create({ model: server.model, input: "a" }), "embeddings");
  },

  async reasoning(server) {
    const thinks = { chat_template_kwargs: { enable_thinking: true } };
    const thought = (await ask(server, thinks)).choices[0].message.reasoning_content;
    assert(thought);
    let told = "";
    for await (const chunk of await ask(server, { ...thinks, stream: true })) told += chunk.choices[0].delta.reasoning_content ?? "";
    assert.equal(told, thought);
    const asked = { model: server.model, input: TALK, instructions: SYSTEM, max_output_tokens: 16, temperature: 0 };
    const said = await client(server).responses.create({ ...asked, reasoning: { effort: "low" } });
    assert.equal(said.output[0].content[0].text, thought);
  },

  async errors(server) {
    await raised(OpenAI.AuthenticationError, ask(server.with("no-such-key")));
    await raised(OpenAI.NotFoundError, ask(server, { model: "none" }), "none");
    await raised(OpenAI.BadRequestError, ask(server, { temperature: -1 }), "temperature");
    await server.whenFull(() => raised(OpenAI.RateLimitError, ask(server)));
  },

  async usage(server) {
    await ask(server);
    const { usage } = await ask(server);
    assert(usage.prompt_tokens_details.cached_tokens > 0);
  },

  async scoring(server) {
    const asked = { model: server.model, prompt: SYSTEM, echo: true, logprobs: 1, max_tokens: 0 };
    const { text, logprobs } = (await client(server).completions.create(asked)).choices[0];
    assert.equal(text, SYSTEM);
    assert(logprobs.token_logprobs.slice(1).every((each) => each <= 0));
  },
});
