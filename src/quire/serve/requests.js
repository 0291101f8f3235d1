const REASONS = { last_token: "last token, always computed", partial_block: "in an incomplete block",
  evicted: "evicted", window: "window or state dropped", cold: "never stored" };
const PHASES = [["pending", "waiting for the first token"], ["queued", "queued"], ["loaded", "loaded from tiers"], ["computed", "computed"], ["decoded", "decoded"]];
const FEW = 6;
let showsAll = false;
/* A request as a bar of its phases on the scale of the longest, and below it its prompt: cached, and missed by reason. */
function requestBar(each, longest) {
  const part = (kind, share) => el("div", { class: kind, style: { width: 100 * share + "%" } });
  const took = PHASES.reduce((sum, [name]) => sum + (each[name + "_s"] || 0), 0);
  const says = PHASES.filter(([name]) => each[name + "_s"] > 0).map(([name, text]) => `${text} ${time(each[name + "_s"])}`).join(", ");
  const rows = [el("div", { class: "line" },
    el("div", { class: "bar", role: "img", "aria-label": says, title: says }, ...PHASES.map(([name]) => part(name, (each[name + "_s"] || 0) / longest))),
    el("span", {}, time(took)))];
  const facts = [`${num(each.prompt_tokens)} prompt tokens`];
  if (each.cached_tokens != null) {
    const missed = Object.entries(each.missed).sort((a, b) => b[1] - a[1]);
    rows.push(el("div", { class: "line" }, el("div", { class: "bar thin" }, part("cached", each.cached_tokens / each.prompt_tokens),
      ...missed.map(([why, n]) => part(why, n / each.prompt_tokens))), el("span", { class: "dim small" }, pct(each.cached_tokens / each.prompt_tokens))));
    facts.push(`${num(each.cached_tokens)} cached` + Object.entries(each.loaded_tokens).map(([tier, n]) => `, ${num(n)} from ${tier}`).join(""));
    facts.push("missed: " + missed.map(([why, n]) => `${num(n)} ${REASONS[why] || why}`).join(", "));
    facts.push(`${num(each.generated_tokens)} generated`);
    if (each.preemptions) facts.push(`${each.preemptions} preemptions`);
  }
  if (each.tenant) facts.unshift(each.tenant);
  facts.push(each.reason || "running");
  rows.push(el("div", { class: "dim small" }, facts.join(" · ")));
  return el("div", { class: "request" }, ...rows);
}
function showRequests(place, recent) {
  if (!recent.length) return place.replaceChildren(el("div", { class: "dim" }, "no request yet"));
  const groups = [["under way, the oldest first", recent.filter(each => !each.reason)], ["ended, the latest first", recent.filter(each => each.reason)]]
    .filter(([, those]) => those.length).map(([name, those]) => [name, showsAll ? those : those.slice(0, FEW), those.length]);
  const longest = Math.max(1e-3, ...groups.flatMap(([, those]) => those).map(each => PHASES.reduce((sum, [name]) => sum + (each[name + "_s"] || 0), 0)));
  const legend = el("div", { class: "legend small" }, ...PHASES.map(([name, text]) => key(name, text)));
  const thin = el("div", { class: "legend small dim" }, "below, the prompt:", key("cached", "cached"),
    key("cold", REASONS.cold), key("evicted", REASONS.evicted), key("window", REASONS.window), key("last_token", "last token or incomplete block"));
  const more = el("button", { class: "more", onclick: () => { showsAll = !showsAll; showRequests(place, recent); } },
    showsAll ? "show fewer" : `show all ${recent.length}`);
  place.replaceChildren(legend, thin, ...groups.flatMap(([name, those]) => [el("h3", {}, name), ...those.map(each => requestBar(each, longest))]),
    ...(groups.some(([, those, count]) => count > FEW) ? [more] : []));
}
