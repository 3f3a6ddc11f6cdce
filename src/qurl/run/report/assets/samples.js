"use strict";
// Sampled completions, token by token: pi_prox / pi_behav as a heat map.

const MARKS = {
  t: "weight truncated at the cap",
  c: "clipped: left the clip range, no gradient",
  r: "rescued: only ACR's wider bound lets it through",
  x: "not trained",
};
const PAGE_SIZE = 40;
const SCALES = [1.01, 1.02, 1.05, 1.1, 1.2, 1.5, 2, 3, 5, 10, 100];
const viewer = { samples: [], shownCount: PAGE_SIZE, current: null, active: 0, scale: 2 };

const worst = (sample) => sample.gaps.reduce((most, gap) => Math.max(most, Math.abs(gap)), 0);
const ratio = (gap) => `×${shown(Math.exp(gap), Math.abs(gap) < 0.01 ? 5 : 3)}`;
const isTruncated = (sample) => sample.finish === "length";
const rewardLevel = (reward) =>
  reward == null ? "" : reward >= 1 ? "good" : reward <= 0 ? "bad" : "";
const visible = (token) =>
  token === "" ? "∅" : token.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/ /g, "␣");

/** The smallest round factor that covers all but the most extreme 0.1% of the tokens. */
function pickScale(samples) {
  const gaps = samples.flatMap((sample) => sample.gaps.map(Math.abs)).sort((a, b) => a - b);
  const most = gaps.length ? Math.exp(gaps[Math.floor(0.999 * (gaps.length - 1))]) : 1;
  return SCALES.find((scale) => scale >= most) ?? SCALES.at(-1);
}

function tint(gap) {
  const strength = Math.min(1, Math.abs(gap) / Math.log(viewer.scale));
  return `rgba(${css(gap > 0 ? "--shy" : "--eager")}, ${(0.6 * strength).toFixed(3)})`;
}

function field(label, control) {
  return el("label", {}, label, control);
}

function choices(name, options) {
  return el(
    "select",
    { name },
    options.map(([value, text]) => el("option", { value }, text)),
  );
}

/** The frame of the section; filled by `showSamples`. */
function buildViewer(home, hasRuns) {
  const number = (name) =>
    el("input", { type: "number", name, min: 0, step: 1, inputmode: "numeric" });
  viewer.form = el(
    "form",
    {
      class: "filters",
      "aria-label": "Filter the samples",
      on: { input: () => filterSamples(true), submit: (event) => event.preventDefault() },
    },
    hasRuns ? field("run", (viewer.runs = choices("run", [["", "all"]]))) : null,
    field("from step", number("from")),
    field("to step", number("to")),
    field(
      "reward",
      choices("reward", [
        ["", "any"],
        ["good", "1 or more"],
        ["part", "between 0 and 1"],
        ["bad", "0 or less"],
      ]),
    ),
    field(
      "end",
      choices("end", [
        ["", "any"],
        ["length", "truncated"],
        ["stop", "ended by itself"],
      ]),
    ),
    field(
      "order",
      choices("order", [
        ["gap", "largest mismatch first"],
        ["new", "newest first"],
        ["old", "oldest first"],
      ]),
    ),
    (viewer.count = el("output", { "aria-live": "polite" })),
  );
  viewer.worst = el("div", { class: "card scroll" });
  viewer.list = el("ul", { class: "list", "aria-label": "Samples" });
  viewer.detail = el("div", { class: "card detail", "aria-live": "off" });
  viewer.note = el("p", { class: "soft" });
  home.replaceChildren(
    el(
      "p",
      { class: "soft" },
      "The sampler is the quantized copy that writes the completions, the policy is the full-precision model that is trained. Colours show where they disagree: how the probability of a token under the policy differs from that under the sampler.",
    ),
    (viewer.legend = el("div", { class: "legend" })),
    viewer.form,
    viewer.worst,
    el("div", { class: "viewer" }, el("div", { class: "card" }, viewer.list), viewer.detail),
    viewer.note,
  );
}

/** Take over the samples of all runs. */
function showSamples(runs) {
  const home = document.querySelector("#samples > div");
  if (!runs.some((run) => run.samples.length)) {
    home.replaceChildren(
      el(
        "p",
        { class: "soft" },
        "No samples have been written yet. track.samples says how many each step keeps.",
      ),
    );
    viewer.form = null;
    return;
  }
  if (!viewer.form) buildViewer(home, runs.length > 1);
  viewer.samples = runs.flatMap((run, index) =>
    run.samples.map((sample, at) => Object.assign(sample, { run: index, runName: run.name, at })),
  );
  if (viewer.runs && viewer.runs.options.length !== runs.length + 1)
    viewer.runs.replaceChildren(
      el("option", { value: "" }, "all"),
      ...runs.map((run, index) => el("option", { value: index }, run.name)),
    );
  viewer.scale = pickScale(viewer.samples);
  const total = runs.reduce((sum, run) => sum + run.num_samples, 0);
  const kept = viewer.samples.length;
  const longest = viewer.samples.some((sample) => sample.left_out)
    ? " The middle of very long completions is left out."
    : "";
  viewer.note.textContent =
    (kept < total
      ? `${kept} of ${total} samples are on this page, evenly spread, to keep it small.`
      : "") + longest;
  drawLegend();
  filterSamples(false);
}

function drawLegend() {
  const ramp = el("span", { class: "ramp", role: "img", "aria-label": "colour scale" });
  ramp.style.background = `linear-gradient(90deg, ${tint(-9)}, transparent, ${tint(9)})`;
  const factor = shown(viewer.scale);
  const marks = new Set(viewer.samples.flatMap((sample) => [...sample.marks]));
  const named = Object.entries(MARKS).filter(([mark]) => marks.has(mark));
  viewer.legend.replaceChildren(
    el("span", {}, `sampled too often (÷${factor})`, ramp, `sampled too rarely (×${factor})`),
    ...named.map(([mark, text]) =>
      el("span", {}, el("span", { class: `m-${mark}` }, "token"), ` ${text}`),
    ),
  );
}

function filterSamples(isNewFilter) {
  const values = Object.fromEntries(new FormData(viewer.form));
  const isIn = (sample) =>
    (!values.run || sample.run === Number(values.run)) &&
    (values.from === "" || sample.step >= Number(values.from)) &&
    (values.to === "" || sample.step <= Number(values.to)) &&
    (!values.reward || (rewardLevel(sample.reward) || "part") === values.reward) &&
    (!values.end || (values.end === "length") === isTruncated(sample));
  const found = viewer.samples.filter(isIn);
  const orders = {
    new: (a, b) => b.step - a.step || a.at - b.at,
    old: (a, b) => a.step - b.step || a.at - b.at,
    gap: (a, b) => worst(b) - worst(a),
  };
  found.sort(orders[values.order]);
  viewer.found = found;
  if (isNewFilter) viewer.shownCount = PAGE_SIZE;
  viewer.count.textContent = `${found.length} of ${viewer.samples.length} samples`;
  drawWorst(found);
  drawList();
  const same =
    viewer.current &&
    found.find(
      (s) =>
        s.run === viewer.current.run &&
        s.step === viewer.current.step &&
        s.problem === viewer.current.problem &&
        s.at === viewer.current.at,
    );
  const next = same ?? found[0] ?? null;
  if (next !== viewer.current || !same) showSample(next, same ? viewer.active : mostWrong(next));
}

const mostWrong = (sample) =>
  sample
    ? sample.gaps.reduce(
        (best, gap, i) => (Math.abs(gap) > Math.abs(sample.gaps[best]) ? i : best),
        0,
      )
    : 0;

/** How many tokens are wrong, and by how much, in one sentence. */
function summary(found) {
  const gaps = found.flatMap((sample) => sample.gaps.map(Math.abs)).sort((a, b) => a - b);
  const factor = (quantile) => shown(Math.exp(gaps[Math.floor(quantile * (gaps.length - 1))]));
  return `Sampler and policy agree within a factor of ${factor(0.99)} on 99% of these ${gaps.length} tokens. The worst token is off by a factor of ${factor(1)}.`;
}

/** The token with the largest ratio of each sample that passes the filter, the worst ones first. */
function drawWorst(found) {
  const tokens = found
    .filter((sample) => sample.gaps.length)
    .map((sample) => {
      const index = mostWrong(sample);
      return { sample, index, gap: sample.gaps[index] };
    });
  tokens.sort((a, b) => Math.abs(b.gap) - Math.abs(a.gap));
  if (!tokens.length) {
    const reason = found.length
      ? "These samples have no prox log-probs, so there is no mismatch to show."
      : "No sample passes the filter.";
    viewer.worst.replaceChildren(el("p", { class: "soft" }, reason));
    return;
  }
  const rows = tokens.slice(0, 8).map(({ sample, index, gap }) => {
    const before = sample.tokens.slice(Math.max(0, index - 6), index).join("");
    const context = index < 6 ? sample.prompt.slice(-24) + before : before;
    const behav = Math.exp(sample.behav[index]);
    return el(
      "tr",
      {},
      el(
        "td",
        {},
        el(
          "button",
          { type: "button", on: { click: () => openToken(sample, index) } },
          `step ${sample.step}`,
        ),
      ),
      el(
        "td",
        {},
        el(
          "span",
          { class: "text" },
          el("span", { class: "soft" }, `…${context.slice(-28).replace(/\n/g, "↵")}`),
          tokenSpan(sample, index, true),
        ),
      ),
      el("td", { class: "num" }, percent(behav, 2)),
      el("td", { class: "num" }, percent(Math.min(1, behav * Math.exp(gap)), 2)),
      el("td", { class: "num" }, ratio(gap)),
      el("td", {}, MARKS[sample.marks[index]]?.split(":")[0] ?? "trained"),
    );
  });
  const head = ["sample", "token in its context", "sampler", "policy", "ratio", "in the update"];
  viewer.worst.replaceChildren(
    el("p", { class: "summary" }, summary(found)),
    table(head, rows, {
      class: "data worst",
      numeric: [2, 3, 4],
      caption: "Tokens with the largest mismatch",
    }),
  );
}

function openToken(sample, index) {
  showSample(sample, index);
  drawList();
  viewer.detail.scrollIntoView({ block: "nearest" });
  viewer.detail.querySelector(".tokens")?.focus({ preventScroll: true });
}

function drawList() {
  const items = viewer.found
    .slice(0, viewer.shownCount)
    .map((sample) =>
      el(
        "li",
        {},
        el(
          "button",
          {
            type: "button",
            "aria-current": sample === viewer.current ? "true" : "false",
            on: { click: () => choose(sample) },
          },
          el(
            "span",
            { class: "top" },
            el("span", {}, `${viewer.runs ? `${sample.runName} · ` : ""}step ${sample.step}`),
            el(
              "span",
              {},
              isTruncated(sample) ? "truncated · " : "",
              el(
                "span",
                { class: `reward ${rewardLevel(sample.reward)}` },
                `reward ${shown(sample.reward)}`,
              ),
            ),
          ),
          el(
            "span",
            { class: "excerpt" },
            `${sample.prompt.slice(-60)} → ${sample.tokens.slice(0, 30).join("") || sample.completion.slice(0, 60)}`,
          ),
        ),
      ),
    );
  const rest = viewer.found.length - viewer.shownCount;
  if (rest > 0)
    items.push(
      el(
        "li",
        {},
        el(
          "button",
          {
            type: "button",
            class: "more",
            on: { click: () => ((viewer.shownCount += PAGE_SIZE), drawList()) },
          },
          `${rest} more`,
        ),
      ),
    );
  viewer.list.replaceChildren(...items);
}

function choose(sample) {
  showSample(sample, mostWrong(sample));
  for (const [index, item] of [...viewer.list.querySelectorAll("button[aria-current]")].entries())
    item.setAttribute("aria-current", viewer.found[index] === sample ? "true" : "false");
}

function tokenSpan(sample, index, isAlone = false) {
  const mark = sample.marks[index];
  const token = sample.tokens[index];
  const span = el(
    "span",
    { class: MARKS[mark] ? `m-${mark}` : null, "data-index": index },
    isAlone ? visible(token) : token.replace(/\n/g, "↵\n") || "·",
  );
  if (sample.gaps.length) span.style.background = tint(sample.gaps[index]);
  return span;
}

function showSample(sample, active) {
  viewer.current = sample;
  if (!sample)
    return viewer.detail.replaceChildren(
      el("p", { class: "soft" }, "No sample passes the filter."),
    );
  const spans = sample.tokens.map((_, index) => tokenSpan(sample, index));
  if (sample.left_out)
    spans.splice(spans.length - 500, 0, el("em", {}, ` … ${sample.left_out} tokens left out … `));
  const reward = el(
    "span",
    { class: `reward ${rewardLevel(sample.reward)}` },
    shown(sample.reward),
  );
  const tokens = el(
    "div",
    {
      class: "tokens text",
      tabindex: "0",
      role: "group",
      "aria-label": "Completion by token. Arrow keys move from token to token.",
      on: {
        keydown: (event) => moveToken(event),
        pointerover: (event) => pointToken(event),
        click: (event) => pointToken(event),
      },
    },
    spans.length ? spans : sample.completion,
  );
  viewer.inspect = el("div", { class: "inspect", "aria-live": "polite" });
  const entries = [
    ["problem", `${sample.problem} · step ${sample.step}`],
    ["prompt", el("span", { class: "text" }, sample.prompt)],
    ["true answer", el("span", { class: "text" }, sample.answer || "–")],
    ["reward", reward],
    [
      "end",
      `${isTruncated(sample) ? "truncated at sampling.max_tokens" : "ended by itself"}, ${sample.length} tokens`,
    ],
  ];
  viewer.detail.replaceChildren(
    el(
      "dl",
      {},
      entries.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]),
    ),
    tokens,
    viewer.inspect,
  );
  if (sample.tokens.length) activate(active);
}

function activate(index) {
  viewer.active = index;
  const { current: sample, detail, inspect } = viewer;
  detail.querySelector(".tokens .active")?.classList.remove("active");
  const span = detail.querySelector(`.tokens [data-index="${index}"]`);
  span?.classList.add("active");
  const chip = el("span", { class: "chip text" }, visible(sample.tokens[index]));
  if (!sample.gaps.length)
    return inspect.replaceChildren(
      chip,
      " The policy's probability was not computed for this sample.",
    );
  const behav = Math.exp(sample.behav[index]);
  const prox = Math.min(1, behav * Math.exp(sample.gaps[index]));
  const mark = MARKS[sample.marks[index]];
  inspect.replaceChildren(
    chip,
    ` sampler ${percent(behav, 3)}, policy ${percent(prox, 3)}: ratio ${ratio(sample.gaps[index])}.`,
    el("br"),
    el(
      "span",
      { class: "soft" },
      mark ? `${mark[0].toUpperCase()}${mark.slice(1)}.` : "Trained: neither clipped nor truncated.",
    ),
  );
}

function pointToken(event) {
  const index = event.target.dataset?.index;
  if (index != null) activate(Number(index));
}

function moveToken(event) {
  const steps = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
  if (!(event.key in steps) || !viewer.current.tokens.length) return;
  event.preventDefault();
  activate(
    Math.min(viewer.current.tokens.length - 1, Math.max(0, viewer.active + steps[event.key])),
  );
  viewer.detail.querySelector(".tokens .active")?.scrollIntoView({ block: "nearest" });
}
