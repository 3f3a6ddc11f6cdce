"use strict";
// The curves, drawn by uPlot.

const SMOOTH_FROM = 40; // points; fewer are shown as they are
const DASHES = [null, [6, 3], [2, 4]]; // of a run's metrics, if there are several runs
const BORDERS = { 3: "dashed", 4: "dotted" }; // the same in the legend
const QUIET = ["checkpoint", "start"]; // kinds of events without a marker
const drawn = new Map(); // chart title → {plot, key, ...}

/** Metric names of a chart, with their labels, that these runs have. */
function metricsOf(chart, runs) {
  const found = new Map();
  for (const [pattern, label] of Object.entries(chart.metrics)) {
    if (!pattern.includes("*")) {
      found.set(pattern, label);
      continue;
    }
    const family = new RegExp(`^${pattern.replaceAll("*", "([^/]+)")}$`);
    for (const run of runs)
      for (const name of Object.keys(run.columns)) {
        const match = name.match(family);
        if (match) found.set(name, match.slice(1).join(" "));
      }
  }
  return [...found].filter(([name]) =>
    runs.some((run) => run.columns[name]?.some((x) => x != null)),
  );
}

/** Where a row stands on the x axis. An evaluation is of the weights after its step. */
function xOf(run, index, isEvaluation, axis) {
  if (axis === "seconds") return run.columns.seconds[index];
  return run.columns.step[index] + (isEvaluation ? 1 : 0);
}

/** One curve per run and metric: {label, name, run, xs, ys, low, high}. */
function curvesOf(chart, runs, axis) {
  if (chart.kind === "stack") return runs.length > 1 ? totals(runs, axis) : parts(runs[0], axis);
  const metrics = metricsOf(chart, runs);
  const curves = [];
  runs.forEach((run, runIndex) => {
    metrics.forEach(([name, label], metricIndex) => {
      const column = run.columns[name];
      if (!column) return;
      const isEvaluation = name.startsWith("eval/");
      const [low, high] = [run.columns[`${name}_low`], run.columns[`${name}_high`]];
      const curve = { name, run: runIndex, xs: [], ys: [], low: [], high: [], isEvaluation };
      column.forEach((y, i) => {
        if (y == null || (chart.scale === "log" && y <= 0)) return;
        curve.xs.push(xOf(run, i, isEvaluation, axis));
        curve.ys.push(y);
        curve.low.push(low?.[i] ?? null);
        curve.high.push(high?.[i] ?? null);
      });
      if (!curve.xs.length) return;
      const many = runs.length > 1;
      curve.label = many ? (metrics.length > 1 ? `${run.name} ${label}` : run.name) : label;
      curve.color = many ? runIndex : metricIndex;
      curve.dash = many ? DASHES[metricIndex % DASHES.length] : null;
      curves.push(curve);
    });
  });
  return curves;
}

/** Seconds of each part of a step, and what the parts leave. */
function partsOf(run) {
  const names = Object.keys(run.columns).filter(
    (name) => name.startsWith("timing_s/") && name !== "timing_s/step",
  );
  const columns = new Map(names.map((name) => [name.slice(9), run.columns[name]]));
  const whole = run.columns["timing_s/step"];
  if (whole) {
    const other = whole.map((x, i) =>
      x == null
        ? null
        : Math.max(0, x - names.reduce((sum, name) => sum + (run.columns[name][i] ?? 0), 0)),
    );
    columns.set("other", other);
  }
  const size = (column) => column.reduce((sum, x) => sum + (x ?? 0), 0);
  return [...columns].sort(
    (a, b) => (a[0] === "other") - (b[0] === "other") || size(b[1]) - size(a[1]),
  );
}

function parts(run, axis) {
  const columns = partsOf(run);
  const rows = (run.columns.step ?? []).map((_, i) => i).filter((i) => run.columns.step[i] >= 0);
  if (!rows.length) return [];
  const below = rows.map(() => 0);
  return columns.map(([part, column]) => {
    const ys = rows.map((i, at) => (below[at] += column[i] ?? 0));
    return {
      label: partName(part),
      run: 0,
      color: partColor(part),
      xs: rows.map((i) => xOf(run, i, false, axis)),
      ys,
      own: rows.map((i) => column[i] ?? 0),
      low: [],
      high: [],
    };
  });
}

function totals(runs, axis) {
  return runs
    .map((run, index) => {
      const rows = (run.columns.step ?? [])
        .map((_, i) => i)
        .filter((i) => run.columns.step[i] >= 0);
      const whole = run.columns["timing_s/step"];
      const sum = (i) => partsOf(run).reduce((total, [, column]) => total + (column[i] ?? 0), 0);
      return {
        label: run.name,
        run: index,
        color: index,
        xs: rows.map((i) => xOf(run, i, false, axis)),
        ys: rows.map((i) => whole?.[i] ?? sum(i)),
        low: [],
        high: [],
      };
    })
    .filter((curve) => curve.xs.length);
}

function movingAverage(values) {
  const half = Math.max(2, Math.floor(values.length / 40));
  return values.map((_, i) => {
    const window = values.slice(Math.max(0, i - half), i + half + 1);
    return window.reduce((sum, x) => sum + x, 0) / window.length;
  });
}

/** Ticks at 1, 2 and 5 times powers of ten, or evenly where that leaves fewer than three. */
function logTicks(low, high) {
  let ticks = [];
  for (const steps of [[1, 2, 5], [1, 3], [1]]) {
    ticks = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
      for (const step of steps) {
        const tick = Number(`${step}e${power}`);
        if (tick >= low && tick <= high) ticks.push(tick);
      }
    if (ticks.length <= 6) break;
  }
  if (ticks.length > 6) {
    const stride = Math.ceil(ticks.length / 6);
    ticks = ticks.filter((_, i) => i % stride === 0);
  }
  if (ticks.length >= 3) return ticks;
  const raw = (high - low) / 4;
  const unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((s) => s * unit >= raw) * unit;
  const even = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high; tick += step)
    even.push(Number(tick.toPrecision(6)));
  return even;
}

function rangeOf(chart, low, high) {
  if (low == null || high == null) return [0, 1];
  if (chart.scale === "log") return [low / 1.25, high * 1.25];
  if (chart.kind === "stack") return [0, high * 1.05 || 1];
  if (low === 0 && high === 0) return [0, chart.scale === "share" ? 0.1 : 1];
  if (low === high) return [low - Math.abs(low) * 0.1, high + Math.abs(high) * 0.1];
  const pad = 0.08 * (high - low);
  const isNearZero = low >= 0 && low < 0.4 * high;
  const top =
    chart.scale === "share" && high <= 1 && high > 0.6 ? Math.min(1.02, high + pad) : high + pad;
  return [isNearZero ? 0 : low - pad, top];
}

const format = (chart) => (chart.scale === "share" ? share : (x) => shown(x));

function clock(seconds) {
  if (seconds < 100) return `${Number(seconds.toPrecision(3))}s`;
  const minutes = seconds / 60;
  return minutes < 100
    ? `${Number(minutes.toPrecision(3))}m`
    : `${Number((minutes / 60).toPrecision(3))}h`;
}

/** Markers of a run's events on the x axis, loudest last so that it is drawn on top. */
function markersOf(runs, axis) {
  const rank = { info: 0, watch: 1, bad: 2 };
  const markers = runs.flatMap((run) =>
    run.events
      .filter((event) => event.step != null && !QUIET.includes(event.kind))
      .map((event) => {
        const at = (run.columns.step ?? []).indexOf(event.step);
        const x = axis === "step" ? event.step : run.columns.seconds?.[at];
        return { x, level: levelOf(event.kind), text: `${event.kind}: ${event.message}` };
      }),
  );
  return markers.filter((marker) => marker.x != null).sort((a, b) => rank[a.level] - rank[b.level]);
}

function markerPlugin(entry) {
  return {
    hooks: {
      draw: (u) => {
        if (!byId("markers").checked) return;
        const { left, top, width, height } = u.bbox;
        const ratio = devicePixelRatio;
        u.ctx.save();
        for (const { x, level } of entry.markers) {
          const at = u.valToPos(x, "x", true);
          if (at < left || at > left + width) continue;
          u.ctx.strokeStyle = u.ctx.fillStyle = css(`--${level}`);
          u.ctx.globalAlpha = 0.75;
          u.ctx.lineWidth = ratio;
          u.ctx.setLineDash([3 * ratio, 3 * ratio]);
          u.ctx.beginPath();
          u.ctx.moveTo(at, top);
          u.ctx.lineTo(at, top + height);
          u.ctx.stroke();
          u.ctx.beginPath();
          u.ctx.moveTo(at - 4 * ratio, top);
          u.ctx.lineTo(at + 4 * ratio, top);
          u.ctx.lineTo(at, top + 6 * ratio);
          u.ctx.fill();
        }
        u.ctx.restore();
      },
    },
  };
}

/** Vertical bars from the low to the high end of each value's interval. */
function intervalPlugin(entry) {
  return {
    hooks: {
      draw: (u) => {
        const ratio = devicePixelRatio;
        u.ctx.save();
        u.ctx.lineWidth = 1.5 * ratio;
        u.ctx.globalAlpha = 0.55;
        entry.curves.forEach((curve, index) => {
          u.ctx.strokeStyle = color(curve.color);
          const shift = (index - (entry.curves.length - 1) / 2) * 3 * ratio;
          curve.xs.forEach((x, i) => {
            if (curve.low[i] == null) return;
            const at = u.valToPos(x, "x", true) + shift;
            if (at < u.bbox.left || at > u.bbox.left + u.bbox.width) return;
            u.ctx.beginPath();
            u.ctx.moveTo(at, u.valToPos(curve.low[i], "y", true));
            u.ctx.lineTo(at, u.valToPos(curve.high[i], "y", true));
            u.ctx.stroke();
          });
        });
        u.ctx.restore();
      },
    },
  };
}

/** The curves as uPlot takes them: aligned columns, and a description of each. */
function seriesOf(chart, curves, isSmooth) {
  const say = format(chart);
  const tables = [];
  const series = [];
  const order = chart.kind === "stack" ? [...curves].reverse() : curves; // the tallest is drawn first
  for (const curve of order) {
    const isStacked = curve.own != null;
    const hasAverage =
      isSmooth && !curve.isEvaluation && !isStacked && curve.xs.length >= SMOOTH_FROM;
    const last = curve.own ? curve.own.at(-1) : curve.ys.at(-1);
    const value = (u, y, si, i) =>
      i == null ? say(last) : say(isStacked ? curve.own[curve.xs.indexOf(u.data[0][i])] : y);
    const paint = color(curve.color);
    const few = curve.xs.length <= SMOOTH_FROM;
    const base = {
      label: curve.label,
      stroke: paint,
      dash: curve.dash ?? undefined,
      value,
      spanGaps: true,
    };
    if (hasAverage) {
      tables.push([curve.xs, curve.ys]);
      series.push({
        ...base,
        label: "",
        class: "raw",
        alpha: 0.28,
        width: 1,
        points: { show: false },
      });
      tables.push([curve.xs, movingAverage(curve.ys)]);
      series.push({ ...base, width: 2, points: { show: false } });
    } else if (isStacked) {
      const isWide = curve.xs.length > 240;
      tables.push([curve.xs, curve.ys]);
      series.push({
        ...base,
        width: isWide ? 1 : 0,
        fill: paint,
        points: { show: false },
        paths: isWide ? undefined : uPlot.paths.bars({ size: [0.85, 40] }),
      });
    } else {
      tables.push([curve.xs, curve.ys]);
      series.push({
        ...base,
        width: 2,
        points: { show: few, size: curve.isEvaluation ? 7 : 5, fill: paint },
      });
    }
  }
  return { data: uPlot.join(tables.map(([xs, ys]) => [xs, ys])), series };
}

function optionsOf(chart, entry, series, width, axis) {
  const ink = () => css("--soft");
  const line = { stroke: () => css("--grid"), width: 1 };
  const font = "12px system-ui, sans-serif";
  const say = format(chart);
  const isLog = chart.scale === "log";
  return {
    width,
    height: 190,
    padding: [10, 14, 0, 0],
    legend: {
      live: true,
      markers: { dash: (u, i) => (u.series[i].dash ? BORDERS[u.series[i].dash[1]] : "solid") },
    },
    cursor: {
      sync: { key: "steps", scales: ["x", null] },
      y: false,
      points: { size: 7 },
      drag: { x: true, y: false },
    },
    scales: {
      x: {
        time: false,
        // A little room, so that the first and the last point are seen as a whole.
        range: (u, low, high) => {
          const room = low === high ? 1 : 0.02 * (high - low);
          return [low - room, high + room];
        },
      },
      y: {
        distr: isLog ? 3 : 1,
        range: (u, low, high) => rangeOf(chart, ...spread(entry.curves, chart, low, high)),
      },
    },
    axes: [
      {
        stroke: ink,
        font,
        grid: { show: false },
        ticks: line,
        size: 30,
        space: 60,
        values: (u, ticks) =>
          ticks.map((x) =>
            x < 0 ? "" : axis === "seconds" ? clock(x) : Number.isInteger(x) ? String(x) : "",
          ),
      },
      {
        stroke: ink,
        font,
        grid: line,
        ticks: { show: false },
        size: 62,
        space: 34,
        splits: isLog ? (u, i, low, high) => logTicks(low, high) : undefined,
        filter: isLog ? (u, ticks) => ticks : undefined,
        values: (u, ticks) =>
          ticks.map((x) =>
            chart.scale === "share"
              ? `${Number((100 * x).toPrecision(4))}%`
              : say(Number(x.toPrecision(6))),
          ),
      },
    ],
    series: [
      {
        label: axis === "step" ? "step" : "time",
        value: (u, x) => (x == null ? "(last)" : axis === "step" ? String(x) : clock(x)),
      },
      ...series,
    ],
    plugins: [markerPlugin(entry), intervalPlugin(entry)],
    hooks: { setCursor: [(u) => noteEvents(u, entry)] },
  };
}

/** The range of a chart's values: intervals count, all zoom levels too. */
function spread(curves, chart, low, high) {
  const ends = curves
    .flatMap((curve) => [...curve.low, ...curve.high])
    .filter((x) => x != null && (chart.scale !== "log" || x > 0));
  if (low == null || !ends.length) return [low, high];
  return [Math.min(low, ...ends), Math.max(high, ...ends)];
}

function noteEvents(u, entry) {
  const at = u.cursor.left;
  const near =
    at < 0 ? [] : entry.markers.filter((marker) => Math.abs(u.valToPos(marker.x, "x") - at) < 6);
  const text = byId("markers").checked
    ? near
        .slice(-2)
        .map((marker) => marker.text)
        .join(" · ")
    : "";
  if (entry.note.textContent !== text) entry.note.textContent = text;
}

/** A sentence for people who do not see the curve. */
function describe(chart, curves) {
  const say = format(chart);
  return curves
    .map((curve) => {
      const ys = curve.own ?? curve.ys;
      const [low, high] = [
        ys.reduce((a, b) => Math.min(a, b)),
        ys.reduce((a, b) => Math.max(a, b)),
      ];
      return `${curve.label}: from ${say(ys[0])} to ${say(ys.at(-1))}, lowest ${say(low)}, highest ${say(high)}`;
    })
    .join("; ");
}

function moveCursor(entry, event) {
  const steps = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
  if (!(event.key in steps)) return;
  event.preventDefault();
  const u = entry.plot;
  const last = u.data[0].length - 1;
  const from = entry.at ?? (steps[event.key] > 0 ? -1 : last + 1);
  entry.at = Math.min(last, Math.max(0, from + steps[event.key]));
  u.setCursor({ left: u.valToPos(u.data[0][entry.at], "x"), top: 10 });
  const values = u.series
    .slice(1)
    .filter((s) => s.class !== "raw")
    .map((s) => {
      const index = u.series.indexOf(s);
      return `${s.label} ${s.value(u, u.data[index][entry.at], index, entry.at)}`;
    });
  entry.spoken.textContent = `${u.series[0].label} ${u.series[0].value(u, u.data[0][entry.at])}: ${values.join(", ")}. ${entry.note.textContent}`;
}

function buildFigure(chart) {
  const entry = { markers: [], curves: [], plot: null, key: "" };
  entry.note = el("div", { class: "eventnote" });
  entry.spoken = el("div", { class: "hidden", "aria-live": "polite" });
  entry.box = el("div", {
    class: chart.kind === "stack" ? "plot stack" : "plot",
    tabindex: "0",
    role: "group",
    "aria-roledescription": "chart",
    on: { keydown: (event) => moveCursor(entry, event), blur: () => (entry.at = null) },
  });
  const unit = chart.unit ? ` (${chart.unit})` : "";
  entry.figure = el(
    "figure",
    { class: "card" },
    el("figcaption", {}, el("b", {}, chart.title + unit), el("span", {}, chart.note)),
    entry.box,
    entry.note,
    entry.spoken,
  );
  new ResizeObserver(() => {
    const width = entry.box.clientWidth;
    if (entry.plot && width && width !== entry.plot.width)
      entry.plot.setSize({ width, height: 190 });
  }).observe(entry.box);
  return entry;
}

/** Draw all charts that have data; what is there already is updated in place. */
function drawCharts(charts, runs, { redo = false } = {}) {
  const axis = document.querySelector("input[name=x]:checked").value;
  const isSmooth = byId("smooth").checked;
  const home = byId("charts");
  for (const chart of charts) {
    let entry = drawn.get(chart.title);
    const curves = curvesOf(chart, runs, axis);
    if (!curves.length) {
      entry?.figure.remove();
      drawn.delete(chart.title);
      continue;
    }
    if (!entry) drawn.set(chart.title, (entry = buildFigure(chart)));
    place(home, charts, chart, entry.figure);
    Object.assign(entry, { curves, markers: markersOf(runs, axis) });
    const { data, series } = seriesOf(chart, curves, isSmooth);
    entry.box.setAttribute("aria-label", `${chart.title}. ${describe(chart, curves)}`);
    const key = JSON.stringify([
      axis,
      series.map((s) => [s.label, s.alpha, s.points.show, s.width]),
    ]);
    if (entry.plot && key === entry.key && !redo) {
      series.forEach((s, i) => (entry.plot.series[i + 1].value = s.value));
      entry.plot.setData(data, !isZoomed(entry.plot));
    } else {
      entry.plot?.destroy();
      entry.plot = new uPlot(
        optionsOf(chart, entry, series, entry.box.clientWidth || 400, axis),
        data,
        entry.box,
      );
      entry.key = key;
      nameLegend(entry.plot);
    }
  }
}

function isZoomed(plot) {
  const xs = plot.data[0];
  return xs.length > 1 && (plot.scales.x.min > xs[0] || plot.scales.x.max < xs.at(-1));
}

/** The legend's entries switch curves on and off: with the keyboard, too. */
function nameLegend(plot) {
  plot.root.querySelectorAll(".u-legend .u-series").forEach((row, index) => {
    if (plot.series[index].class === "raw") ((row.hidden = true), (row.style.display = "none"));
    const head = row.querySelector("th");
    if (index === 0 || !head) return;
    head.tabIndex = 0;
    head.setAttribute("role", "button");
    head.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      head.click();
    });
  });
}

/** Put a figure into the grid of its group, in the order of the charts. */
function place(home, charts, chart, figure) {
  if (figure.isConnected) return;
  const groups = [...new Set(charts.map((c) => c.group))];
  const id = `group-${groups.indexOf(chart.group)}`;
  let grid = byId(id);
  if (!grid) {
    const section = el(
      "div",
      { "data-order": groups.indexOf(chart.group) },
      el("h3", {}, chart.group),
      (grid = el("div", { class: "grid", id })),
    );
    const after = [...home.children].find(
      (child) => Number(child.dataset.order) > Number(section.dataset.order),
    );
    home.insertBefore(section, after ?? null);
  }
  const order = charts
    .filter((c) => c.group === chart.group)
    .map((c) => drawn.get(c.title)?.figure);
  const next = order.slice(order.indexOf(figure) + 1).find((other) => other?.isConnected);
  grid.insertBefore(figure, next ?? null);
}
