"use strict";
// The page: what is embedded at first, and what a live server pushes.

const MAX_SAMPLES = 1000; // of a page that is open for long
const MAX_EVENTS = 500; // of a run
const RANK = { bad: 0, watch: 1, info: 2 };
const byRank = (a, b) => RANK[levelOf(a.kind)] - RANK[levelOf(b.kind)];
const state = { runs: [], comparison: data.comparison, lastRow: Date.now() };

/** Take over what is new of a run; returns it as it is now. */
function merge(run, update) {
  if (update.reset || !run) return { ...update, columns: { ...update.columns } };
  const before = run.columns.step?.length ?? 0;
  const added = update.columns.step?.length ?? 0;
  for (const name of new Set([...Object.keys(run.columns), ...Object.keys(update.columns)]))
    run.columns[name] = [
      ...(run.columns[name] ?? Array(before).fill(null)),
      ...(update.columns[name] ?? Array(added).fill(null)),
    ];
  run.events = loudest([...run.events, ...update.events]);
  run.samples = [...run.samples, ...update.samples].slice(-MAX_SAMPLES);
  const { verdict, seconds, machines, num_samples, num_events } = update;
  return Object.assign(run, { verdict, seconds, machines, num_samples, num_events });
}

/** Of too many events the loudest, and of those as loud the last. */
function loudest(events) {
  const kept = new Set([...events].reverse().sort(byRank).slice(0, MAX_EVENTS));
  return events.filter((event) => kept.has(event));
}

/** "A model made from scratch, trained on arithmetic by GRPO with ACR; rollouts in INT8" */
function summarize(c) {
  const model = c["model.path"] === "scratch" ? "A model made from scratch" : c["model.path"];
  const upper = (key) => String(c[key]).toUpperCase();
  const format = c["quant.format"] === "none" ? "full precision" : upper("quant.format");
  return `${model}, trained on ${c["task.name"]} by ${upper("algo.name")} with ${upper("algo.objective")}; rollouts in ${format}`;
}

function showHead(runs) {
  byId("title").textContent = runs.map((run) => run.name).join(" · ");
  const texts = runs.map((run) => summarize(run.config));
  byId("subtitle").textContent = [...new Set(texts)].join(" · ");
}

function showVerdict(runs) {
  const focused = document.activeElement?.id;
  const opened = new Map(
    [...document.querySelectorAll("details.verdict")].map((box) => [box.dataset.run, box.open]),
  );
  byId("verdict").replaceChildren(
    ...runs.map(({ name, verdict }) => {
      const { level, title, done, steps, checks } = verdict;
      const isDone = done >= steps;
      const text = isDone ? `all ${steps} steps are done` : `${done} of ${steps} steps`;
      const isAlone = runs.length === 1; // several are folded, unless something is wrong
      const isOpen = isAlone || opened.get(name) || (!opened.size && level !== "good");
      return el(
        isAlone ? "div" : "details",
        { class: "card verdict", "data-run": name, open: !isAlone && isOpen },
        el(
          isAlone ? "div" : "summary",
          { class: `head level-${level}` },
          icon(level),
          el("span", { class: "title" }, runs.length > 1 ? `${name}: ${title}` : title),
          el(
            "span",
            { class: "progress" },
            text,
            el("progress", { max: steps, value: done, "aria-label": `${text} of ${name}` }),
          ),
        ),
        el(
          "ul",
          { class: "checks" },
          checks.map((check) =>
            el(
              "li",
              {},
              icon(check.level),
              el("div", {}, el("b", {}, check.question), el("span", {}, check.answer)),
            ),
          ),
        ),
      );
    }),
  );
  if (focused === "verdict") byId("verdict").focus();
}

function showTime(runs) {
  const blocks = runs
    .filter((run) => Object.values(run.seconds).some((x) => x > 0))
    .map((run, index) => {
      const parts = Object.entries(run.seconds).sort(
        (a, b) => (a[0] === "other") - (b[0] === "other") || b[1] - a[1],
      );
      const total = parts.reduce((sum, [, x]) => sum + x, 0);
      const paint = (name) => color(partColor(name));
      const label = parts
        .map(([name, x]) => `${partName(name)} ${percent(x / total, 0)}`)
        .join(", ");
      return el(
        "div",
        { class: "runtime" },
        el(
          "p",
          {},
          el("b", {}, runs.length > 1 ? `${run.name}: ` : "", duration(total)),
          el(
            "span",
            { class: "soft" },
            ` in all, ${duration(total / Math.max(1, run.verdict.done))} per step`,
          ),
        ),
        el(
          "div",
          { class: "split", role: "img", "aria-label": label, style: { "margin-top": ".6rem" } },
          parts.map(([name, x]) =>
            el("span", {
              title: `${partName(name)} ${duration(x)}`,
              style: { flex: `${x / total} 0 0`, background: paint(name) },
            }),
          ),
        ),
        el(
          "ul",
          { class: "parts wide" },
          parts
            .filter(([, x]) => x / total >= 0.0005)
            .map(([name, x]) =>
              el(
                "li",
                {},
                el("span", { class: "swatch", style: { background: paint(name) } }),
                el(
                  "span",
                  {},
                  `${partName(name)} `,
                  el("b", {}, percent(x / total, 1)),
                  ` ${duration(x)}`,
                  index ? null : el("span", { class: "soft hint" }, partMeaning(name)),
                ),
              ),
            ),
        ),
      );
    });
  document
    .querySelector("#time > div")
    .replaceChildren(
      ...(blocks.length ? blocks : [el("p", { class: "soft" }, "No step has been logged yet.")]),
    );
}

function showComparison(comparison, runs) {
  const section = byId("comparison");
  section.hidden = !comparison;
  document.querySelector("nav a[href='#comparison']").hidden = !comparison;
  if (!comparison) return;
  const names = runs.map((run) => run.name);
  const heading = (text) => el("h3", {}, text);
  const verdicts = el(
    "ul",
    { class: "checks card", style: { padding: "0", overflow: "hidden" } },
    comparison.verdicts.map(({ level, text }) => el("li", {}, icon(level), el("span", {}, text))),
  );
  const say = (name) => (name.startsWith("effective sample size") ? share : shown);
  const rows = Object.keys(comparison.numbers[0])
    .filter((name) => comparison.numbers.some((row) => row[name] != null))
    .map((name) =>
      el(
        "tr",
        {},
        el("td", {}, name),
        comparison.numbers.map((row) => el("td", { class: "num" }, row[name] == null ? "–" : say(name)(row[name]))),
      ),
    );
  const differences = Object.entries(comparison.differences).map(([key, values]) =>
    el(
      "tr",
      {},
      el("td", {}, el("code", {}, key)),
      values.map((value) => el("td", {}, value)),
    ),
  );
  section.lastElementChild.replaceChildren(
    verdicts,
    el(
      "p",
      { class: "soft hint", style: { "margin-top": ".5rem" } },
      "Intervals cover the choice of problems, not that of the seed. Repeat runs with other seeds before you believe a small difference.",
    ),
    heading("What differs in the recipes"),
    el(
      "div",
      { class: "card scroll" },
      differences.length
        ? table(["key", ...names], differences)
        : el("p", {}, "Nothing: these recipes are the same."),
    ),
    heading("Numbers"),
    el("div", { class: "card scroll" }, table(["", ...names], rows, { numeric: names.map((_, i) => i + 1) })),
  );
}

function showEvents(runs) {
  const known = ["time", "kind", "message", "step"];
  const events = runs.flatMap((run) =>
    run.events.map((event) => ({ ...event, runName: run.name })),
  );
  events.sort((a, b) => (a.time < b.time ? 1 : a.time > b.time ? -1 : 0));
  const kinds = [...new Set([...events].sort(byRank).map((event) => event.kind))];
  const home = document.querySelector("#events > div");
  if (!events.length) return home.replaceChildren(el("p", { class: "soft" }, "None."));
  const summary = el(
    "div",
    { class: "parts", style: { margin: "0 0 .8rem" } },
    kinds.map((kind) =>
      el(
        "span",
        { class: `tag ${levelOf(kind)}` },
        `${kind} ${events.filter((event) => event.kind === kind).length}`,
      ),
    ),
  );
  const total = runs.reduce((sum, run) => sum + run.num_events, 0);
  const rows = events.map((event) => {
    const more = Object.entries(event).filter(
      ([key, value]) => ![...known, "runName"].includes(key) && value != null && value !== "{}",
    );
    return el(
      "tr",
      {},
      el(
        "td",
        { class: "soft" },
        String(event.time ?? "")
          .replace("T", " ")
          .replace("+00:00", ""),
      ),
      runs.length > 1 ? el("td", {}, event.runName) : null,
      el("td", {}, el("span", { class: `tag ${levelOf(event.kind)}` }, String(event.kind))),
      el("td", {}, event.step == null ? "" : `step ${event.step}`),
      el(
        "td",
        {},
        String(event.message ?? ""),
        more.length
          ? el(
              "div",
              { class: "soft hint" },
              more.map(([key, value]) => `${key}: ${value}`).join(" · "),
            )
          : null,
      ),
    );
  });
  const head = ["time (UTC)", ...(runs.length > 1 ? ["run"] : []), "kind", "step", "message"];
  home.replaceChildren(
    summary,
    el("div", { class: "card" }, table(head, rows, { class: "data events" })),
    total > events.length
      ? el("p", { class: "soft" }, `${events.length} of ${total}; alarms and warnings are left out last.`)
      : "",
  );
}

function showRecipe(runs) {
  document.querySelector("#recipe > div").replaceChildren(
    ...runs.flatMap((run) => {
      const machine = run.machines.at(-1);
      const versions = Object.entries(machine?.versions ?? {})
        .map(([name, version]) => `${name} ${version}`)
        .join(", ");
      const facts = machine
        ? [
            ["device", machine.device],
            [
              "versions",
              `Python ${machine.python}, ${versions}${machine.cuda ? `, CUDA ${machine.cuda}` : ""}`,
            ],
            ["commit", machine.commit ?? "unknown (not run from a checkout)"],
            ["started", `${run.machines.length} time${run.machines.length > 1 ? "s" : ""}`],
          ]
        : [["machine", "not recorded"]];
      const title = runs.length > 1 ? el("h3", {}, run.name) : null;
      const recipe = Object.entries(run.config).map(([key, value]) => [el("code", {}, key), value]);
      const stride =
        run.stride > 1
          ? el(
              "p",
              { class: "soft" },
              `Every ${run.stride}th step is drawn, to keep the page small.`,
            )
          : null;
      return [
        title,
        el("div", { class: "card" }, pairs(facts)),
        stride,
        el(
          "details",
          { class: "card", style: { "margin-top": "1rem" } },
          el("summary", {}, "All keys of the recipe"),
          el("div", { class: "columns" }, pairs(recipe)),
        ),
      ].filter(Boolean);
    }),
  );
}

function show(changed = { samples: true, recipe: true }) {
  const { runs } = state;
  showHead(runs);
  showVerdict(runs);
  showComparison(state.comparison, runs);
  showTime(runs);
  drawCharts(data.charts, runs);
  if (changed.samples) showSamples(runs);
  showEvents(runs);
  if (changed.recipe) showRecipe(runs);
}

// Live

function setLive(level, text) {
  const pill = byId("live");
  pill.hidden = false;
  if (pill.className !== `pill ${level}`) pill.className = `pill ${level}`;
  if (pill.textContent !== text) pill.textContent = text;
}

/** How long ago the last step was, and whether that is too long. */
function showAge() {
  if (!state.isOpen) return setLive("watch", "reconnecting");
  const age = (Date.now() - state.lastRow) / 1000;
  const isDone = state.runs.every((run) => run.verdict.done >= run.verdict.steps);
  const steps = state.runs
    .flatMap((run) => run.columns["timing_s/step"] ?? [])
    .filter((x) => x != null)
    .sort((a, b) => a - b);
  const usual = steps[Math.floor(steps.length / 2)] ?? 60;
  if (isDone) return setLive("info", "finished");
  const isLate = state.hasRow && age > Math.max(60, 10 * usual);
  setLive(isLate ? "watch" : "good", isLate ? `no step for ${duration(Math.round(age))}` : "live");
}

function receive(message) {
  const { updates, comparison, error } = message;
  byId("problem").hidden = !error;
  byId("problem").textContent = error ?? "";
  if (error) return;
  const changed = { samples: false, recipe: false };
  for (const update of updates) {
    state.runs[update.index] = merge(state.runs[update.index], update);
    changed.samples ||= update.reset || update.samples.length > 0;
    changed.recipe ||= update.reset;
    if (update.columns.step?.length)
      Object.assign(state, { lastRow: Date.now(), hasRow: !update.reset || state.hasRow });
  }
  state.comparison = comparison;
  if (state.runs.filter(Boolean).length < data.runs.length) return;
  show(changed);
  showAge();
  byId("announce").textContent = state.runs
    .map(({ name, verdict: v }) => `${name}: ${v.title}, ${v.done} of ${v.steps} steps`)
    .join("; ");
}

function connect() {
  const source = new EventSource(`events${location.search}`);
  source.onopen = () => ((state.isOpen = true), showAge());
  source.onmessage = (event) => receive(JSON.parse(event.data));
  source.onerror = () => ((state.isOpen = false), showAge());
  setInterval(showAge, 1000);
}

for (const name of ["x", "smooth", "markers"])
  for (const input of document.querySelectorAll(name === "x" ? "input[name=x]" : `#${name}`))
    input.addEventListener("change", () => drawCharts(data.charts, state.runs, { redo: true }));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  if (!state.runs.length) return;
  drawCharts(data.charts, state.runs, { redo: true });
  show();
});

if (data.live) connect();
else {
  state.runs = data.runs.map((run) => merge(null, run));
  show();
}
