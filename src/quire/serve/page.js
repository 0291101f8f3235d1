const MOST_SAMPLES = 450, BACK = 5, TREE_MS = 8000;
let samples = [], every = 2000, treeDue = 0;
function tiles(state) {
  const { engine, latency } = state, made = change(samples, "generated_tokens", BACK).at(-1);
  const times = (name, spread) => [`${name}, p50`, time(spread && spread.p50), spread ? "p99 " + time(spread.p99) : ""];
  return [["requests per second", few(latency.requests_per_s)], ["running", num(engine.running), `${num(engine.waiting)} waiting`],
    times("time to first token", latency.ttft_s), times("time between tokens", latency.itl_s), times("time in the queue", latency.queue_s),
    ["tokens per second", made ? few(made.by / made.s) : "–"], ["preemptions", num(engine.preemptions)],
    ["hit rate", pct(state.stats.hit_rate), `${num(state.stats.hit_tokens)} cached tokens`],
  ].map(([name, value, more]) => el("div", {}, el("div", { class: "dim small" }, name), el("div", { class: "big" }, value), el("div", { class: "small" }, more || "")));
}
function draw(state) {
  const common = { everyS: state.every_s };
  const asked = change(samples, "prompt_tokens", BACK), hit = change(samples, "hit_tokens", BACK);
  chart($("hits"), samples, [{ name: "hit rate", kind: "cached", values: asked.map((each, at) => each && each.by && hit[at] ? hit[at].by / each.by : null) }],
    { ...common, top: 1, show: pct, label: "hit rate over time" });
  const busy = name => samples.map(each => each.running + each.waiting ? each[name] : null);
  chart($("queue"), samples, [{ name: "running", kind: "one", values: busy("running") }, { name: "waiting", kind: "two", values: busy("waiting") }],
    { ...common, show: num, label: "running and waiting requests over time" });
  for (const name of ["ttft", "itl"]) chart($(name), samples, [["p50", "one"], ["p99", "two"]].map(([part, kind]) =>
    ({ name: part, kind, values: samples.map(each => each[name + "_s"] ? each[name + "_s"][part] : null) })), { ...common, show: time, label: name + ", p50 and p99 over time" });
  const pools = $("pool"), tiers = $("tiers");
  while (pools.childElementCount < state.groups.length) pools.append(el("div", {}, el("div", { class: "dim small" }), el("div")));
  state.groups.forEach((group, g) => {
    const [says, place] = pools.children[g].children;
    says.textContent = `${group.name}: ${num(group.num_blocks)} blocks of ${state.block_size} tokens, ${num(group.free)} free`;
    chart(place, samples, ["active", "pinned", "cached"].map((kind, n) => ({ name: kind, kind, values: samples.map(each => each.groups[g] ? each.groups[g][n + 1] : null) })),
      { ...common, top: group.num_blocks, stacked: true, show: num, label: `blocks of ${group.name} over time` });
  });
  $("tierbox").hidden = !state.tiers.length;
  while (tiers.childElementCount < state.tiers.length) tiers.append(el("div", {}, el("div", { class: "dim small" }), el("div")));
  state.tiers.forEach((tier, n) => {
    const [says, place] = tiers.children[n].children;
    says.textContent = `${tier.name}: ${num(tier.records)} records` + (tier.capacity_bytes > 0 ? ` of ${bytes(tier.capacity_bytes)}` : "") + (tier.queued_bytes ? `, ${bytes(tier.queued_bytes)} to be written` : "");
    chart(place, samples, [{ name: "bytes", kind: "loaded", values: samples.map(each => each.tiers[n] ?? null) }],
      { ...common, top: tier.capacity_bytes > 0 ? tier.capacity_bytes : 0, stacked: true, show: bytes, label: `bytes in ${tier.name} over time` });
  });
}
function show(state) {
  const s = state.stats, w = state.what_if;
  $("model").textContent = state.model;
  $("tiles").replaceChildren(...tiles(state));
  $("window").textContent = `Rates and percentiles are of the last ${Math.round(state.latency.window_s)} seconds, hit rate and tokens of all requests since the start.`;
  draw(state);
  const missed = Object.entries(s.missed).filter(([, n]) => n).sort((a, b) => b[1] - a[1]);
  $("missed").replaceChildren(...table(["reason", "prompt tokens", "share"], missed.map(([why, n]) => [REASONS[why] || why, num(n), pct(n / s.prompt_tokens)])));
  $("whatif").replaceChildren(...(w && s.num_requests ? table(["memory", "hit rate"], w.points.map(p => [p.factor + " x", pct(p.hit_rate)]).concat([["no limit", pct(w.ceiling)]]))
    : [el("div", { class: "dim" }, w ? "no request yet" : "no curve is kept")]));
  const seen = state.tenants.filter(each => each.ended || each.prompt_tokens || each.running || each.waiting);
  $("tenants").replaceChildren(...table(["tenant", "running", "waiting", "prompt tokens", "cached tokens", "hit rate", "generated tokens", "preemptions"],
    seen.sort((a, b) => b.prompt_tokens + b.generated_tokens - a.prompt_tokens - a.generated_tokens).map(each => [each.tenant || "all (no keys)", num(each.running), num(each.waiting),
      num(each.prompt_tokens), num(each.cached_tokens), each.prompt_tokens ? pct(each.cached_tokens / each.prompt_tokens) : "–", num(each.generated_tokens), num(each.preemptions)])));
  const p = state.passages, e = p && p.estimate, range = (name, say) => say(e[name]) + " (" + say(e[name + "_low"]) + " to " + say(e[name + "_high"]) + ")";
  $("passagebox").hidden = !p;
  if (p) $("passages").replaceChildren(...table(["tenants served", "declined", "being measured", "prompts compared", "agreement (95 %)", "KL, nats (95 %)"],
    [[num(p.served), num(p.declined), num(p.open), num(p.prompts), e ? range("agreement", pct) : "–", e ? range("kl", x => x.toFixed(4)) : "–"]]));
  showRequests($("requests"), state.recent);
}
async function asked(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error("the server says " + answer.status);
  return answer.json();
}
async function poll() {
  try {
    const last = samples.length ? samples.at(-1).at : 0, state = await asked("v1/cache?since=" + last);
    samples = samples.concat(state.samples.filter(each => each.at > last)).slice(-MOST_SAMPLES);
    show(state);
    every = 1000 * state.every_s;
    if (Date.now() >= treeDue) {
      showTree($("tree"), (await asked("v1/cache/tree")).scopes);
      treeDue = Date.now() + TREE_MS;
    }
    $("state").textContent = "live"; $("state").className = "dim";
  } catch (error) {
    $("state").textContent = "no answer: " + error.message; $("state").className = "bad";
  }
  setTimeout(poll, document.hidden ? 5 * every : every);
}
poll();
