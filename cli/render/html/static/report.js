"use strict";
// The script of a report: hints of charts, the theme, and the timeline. It shows what the page holds and asks for
// nothing else. Text goes into the page as text (textContent), never as markup.
(() => {
  const byId = (id) => document.getElementById(id);
  const tip = byId("tip");

  function showTip(text, x, y) {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = Math.max(8, Math.min(x + 14, innerWidth - box.width - 8));
    const below = y + 18 + box.height < innerHeight;
    tip.style.left = `${left}px`;
    tip.style.top = `${Math.max(8, below ? y + 18 : y - box.height - 12)}px`;
  }
  function hideTip() { tip.hidden = true; }

  // --- the theme ---

  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const theme = byId("theme");
  theme.hidden = false;
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  const label = () => { theme.textContent = isDark() ? "Light" : "Dark"; };
  theme.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    label();
    redraw();
  });
  dark.addEventListener("change", () => { label(); redraw(); });
  label();

  // --- charts ---

  for (const svg of document.querySelectorAll("svg[tabindex]")) {
    const marks = [...svg.querySelectorAll("[data-tip]")];
    let at = -1;
    const go = (place) => {
      if (at >= 0) marks[at].classList.remove("here");
      at = place;
      if (at < 0) return hideTip();
      marks[at].classList.add("here");
      const box = marks[at].getBoundingClientRect();
      showTip(marks[at].dataset.tip, box.left + box.width / 2, box.top + box.height / 2);
    };
    svg.addEventListener("pointermove", (event) => {
      const mark = event.target.closest("[data-tip]");
      if (mark) showTip(mark.dataset.tip, event.clientX, event.clientY); else hideTip();
    });
    svg.addEventListener("pointerleave", hideTip);
    svg.addEventListener("blur", () => go(-1));
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (event.key === "Escape") go(-1);
      if (!step || !marks.length) return;
      event.preventDefault();
      go(at < 0 ? (step > 0 ? 0 : marks.length - 1) : (at + step + marks.length) % marks.length);
    });
  }

  // --- columns of numbers (packing.py) ---

  async function bytesOf(text) {
    const raw = atob(text);
    const packed = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) packed[i] = raw.charCodeAt(i);
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  }

  function unpack(bytes, column) {
    const { at, count, width, signed, summed } = column;
    const kinds = { 1: Uint8Array, 2: Uint16Array, 3: Uint32Array, 4: Uint32Array };
    const values = new (signed || summed ? Float64Array : kinds[width] || Float64Array)(count);
    let scale = 1;
    for (let plane = 0; plane < width; plane++, scale *= 256) {
      const begin = at + plane * count;
      for (let i = 0; i < count; i++) values[i] += bytes[begin + i] * scale;
    }
    if (signed) {
      for (let i = 0; i < count; i++) {
        const v = values[i];
        values[i] = v % 2 ? -(v + 1) / 2 : v / 2;
      }
    }
    if (summed) for (let i = 1; i < count; i++) values[i] += values[i - 1];
    return values;
  }

  // --- the timeline ---

  const MISSING = 65535;
  const LANE = 54, COUNTER = 52, LABEL = 17, AXIS = 24, STRIP = 20;
  const canvas = byId("timeline-canvas");
  let data = null;      // the directory, its columns unpacked
  let view = null;      // [from, to] in us
  let picked = null;    // { lane, place } of the pass that is shown
  let colours = {};
  let queued = false;

  function redraw() {
    if (!data || queued) return;
    queued = true;
    requestAnimationFrame(() => { queued = false; draw(); });
  }

  function readColours() {
    // What light-dark() comes to is only known of a property that takes a colour.
    const probe = document.createElement("i");
    canvas.after(probe);
    for (const name of ["page", "panel", "text", "quiet", "line", "strong-line", "link", ...data.phases]) {
      probe.style.color = `var(--${name})`;
      colours[name] = getComputedStyle(probe).color;
    }
    probe.remove();
  }

  function ready(directory, bytes) {
    data = directory;
    for (const lane of data.lanes) {
      for (const level of lane.levels) {
        level.shares = level.shares.map((column) => unpack(bytes, column));
        level.begun = unpack(bytes, level.begun);
      }
      if (!lane.rows) continue;
      const rows = {};
      for (const [name, column] of Object.entries(lane.rows)) rows[name] = unpack(bytes, column);
      const start = new Float64Array(rows.gap.length);
      let end = 0, longest = 0;
      for (let i = 0; i < start.length; i++) {
        start[i] = end + rows.gap[i];
        end = start[i] + rows.span[i];
        if (rows.span[i] > longest) longest = rows.span[i];
      }
      lane.rows = { ...rows, start, longest };
    }
    for (const counter of data.counters) {
      for (const level of counter.levels) {
        for (const name of ["mean", "least", "greatest"]) {
          if (level[name]) level[name] = unpack(bytes, level[name]);
        }
      }
    }
    view = [0, data.spanUs];
  }

  const duration = (us) => {
    const a = Math.abs(us);
    if (a === 0) return "0 s";
    if (a >= 7.2e9) return `${(us / 3.6e9).toFixed(2)} h`;
    if (a >= 1.2e8) return `${(us / 6e7).toFixed(2)} min`;
    if (a >= 1e6) return `${(us / 1e6).toFixed(a >= 1e8 ? 1 : a >= 1e7 ? 2 : 3)} s`;
    if (a >= 1e3) return `${(us / 1e3).toFixed(a >= 1e5 ? 0 : a >= 1e4 ? 1 : 2)} ms`;
    return `${us.toFixed(0)} µs`;
  };
  // Steps of the axis from half a minute on, in seconds.
  const SECONDS = [
    30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800, 2592000,
  ];
  // A moment, as exact as a step is long.
  function clock(us, step) {
    if (us < step / 2 || us < 0.5) return "0 s";
    if (us < 999.5e3) return us < 999.5 ? `${Math.round(us)} µs` : `${Number((us / 1e3).toFixed(3))} ms`;
    const decimals = Math.min(Math.max(0, -Math.floor(Math.log10(step / 1e6) + 0.01)), 6);
    if (us < 1.2e8) return `${(us / 1e6).toFixed(decimals)} s`;
    const seconds = step < 6e7 ? us / 1e6 : Math.round(us / 6e7) * 60;
    const hours = Math.floor(seconds / 3600), minutes = Math.floor(seconds / 60) % 60;
    const parts = [];
    if (hours) parts.push(`${hours} h`);
    if (minutes) parts.push(`${minutes} min`);
    if (step < 6e7) parts.push(`${(seconds - 3600 * hours - 60 * minutes).toFixed(decimals)} s`);
    return parts.join(" ") || "0 s";
  }
  // The first place whose value is not below x.
  function firstNotBelow(values, x) {
    let low = 0, high = values.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (values[middle] < x) low = middle + 1; else high = middle;
    }
    return low;
  }
  const inView = (rows) => [
    firstNotBelow(rows.start, view[0] - rows.longest), firstNotBelow(rows.start, view[1]),
  ];
  const laneTop = (place) => STRIP + place * (LANE + LABEL) + LABEL;
  const countersTop = () => STRIP + data.lanes.length * (LANE + LABEL) + AXIS;
  const counterTop = (place) => countersTop() + place * (COUNTER + LABEL) + LABEL;
  const heightOf = () => countersTop() + data.counters.length * (COUNTER + LABEL) + 4;

  // Whether passes are drawn one by one: where most are as wide as a pixel, or bins would be far wider than that.
  function isSingle(lane, first, last, width) {
    if (!lane.levels.length) return true;
    if (!lane.rows) return false;
    const finest = data.spanUs / lane.levels[lane.levels.length - 1].bins;
    const coarse = finest / (view[1] - view[0]) * width > 3;
    return last - first <= 0.75 * width || (coarse && last - first <= data.oneByOne);
  }

  function levelFor(levels, width) {
    // The coarsest level whose bins are no wider than a pixel and a half, else the finest.
    const perPixel = (view[1] - view[0]) / width;
    for (const level of levels) if (data.spanUs / level.bins <= 1.5 * perPixel) return level;
    return levels[levels.length - 1];
  }

  function draw() {
    readColours();
    const width = Math.max(canvas.clientWidth, 100), height = heightOf();
    const ratio = Math.min(devicePixelRatio || 1, 3);
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.style.height = `${height}px`;
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    const g = canvas.getContext("2d");
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.fillStyle = colours.page;
    g.fillRect(0, 0, width, height);
    g.font = `12px ${getComputedStyle(document.body).fontFamily}`;
    g.textBaseline = "alphabetic";
    drawStrip(g, width);
    const x = (us) => (us - view[0]) / (view[1] - view[0]) * width;
    let shown = 0, single = true;
    data.lanes.forEach((lane, place) => {
      const top = laneTop(place);
      const name = data.lanes.length > 1 || lane.rank ? `rank ${lane.rank}` : "passes";
      g.fillStyle = colours.quiet;
      g.fillText(name, 0, top - 5);
      g.fillStyle = colours.panel;
      g.fillRect(0, top, width, LANE);
      const [first, last] = lane.rows ? inView(lane.rows) : [0, Infinity];
      if (isSingle(lane, first, last, width)) {
        shown += drawPasses(g, lane.rows, first, last, x, top);
      } else {
        single = false;
        drawBins(g, lane, levelFor(lane.levels, width), x, top);
      }
    });
    drawAxis(g, width, laneTop(data.lanes.length - 1) + LANE, x);
    data.counters.forEach((counter, place) => drawCounter(g, counter, counterTop(place), width, x));
    drawPicked(g, x);
    const long = view[1] - view[0];
    const span = long < data.spanUs
      ? `${duration(long)} from ${clock(view[0], long / 100)}, of ${duration(data.spanUs)}`
      : `all of ${duration(data.spanUs)}`;
    byId("timeline-view").textContent = single ? `${span}, ${shown} ${shown === 1 ? "pass" : "passes"}` : span;
    canvas.dataset.drawn = single ? "passes" : "bins";
    canvas.dataset.from = view[0];
    canvas.dataset.to = view[1];
  }

  function drawStrip(g, width) {
    // The whole run, and where the view lies in it.
    g.fillStyle = colours.panel;
    g.fillRect(0, 0, width, STRIP - 6);
    const from = view[0] / data.spanUs * width, to = view[1] / data.spanUs * width;
    g.fillStyle = colours.link;
    g.globalAlpha = 0.35;
    g.fillRect(from, 0, Math.max(to - from, 3), STRIP - 6);
    g.globalAlpha = 1;
    g.strokeStyle = colours["strong-line"];
    g.strokeRect(0.5, 0.5, width - 1, STRIP - 7);
  }

  function drawPasses(g, rows, first, last, x, top) {
    let shown = 0;
    for (let i = first; i < last; i++) {
      const begin = rows.start[i], end = begin + rows.span[i];
      if (end < view[0]) continue;
      shown++;
      g.fillStyle = colours[data.phases[rows.phase[i]]];
      g.globalAlpha = rows.status[i] === data.steady ? 1 : 0.4;
      const [left, right] = snapped(x(begin), x(end));
      // Between passes that can be seen one by one there is a gap.
      g.fillRect(left, top, right - left > 4 ? right - left - 1 : right - left, LANE);
    }
    g.globalAlpha = 1;
    return shown;
  }

  // Edges on pixels: half a pixel of a colour would be a paler one.
  function snapped(left, right) {
    const ratio = Math.min(devicePixelRatio || 1, 3);
    const begin = Math.floor(left * ratio + 0.01);
    return [begin / ratio, Math.max(Math.floor(right * ratio + 0.01), begin + 1) / ratio];
  }

  function drawBins(g, lane, level, x, top) {
    const bin = data.spanUs / level.bins;
    const first = Math.max(Math.floor(view[0] / bin), 0);
    const last = Math.min(Math.ceil(view[1] / bin), level.bins);
    for (let i = first; i < last; i++) {
      const [left, right] = snapped(x(i * bin), x((i + 1) * bin));
      g.fillStyle = colours.panel;
      g.fillRect(left, top, right - left, LANE);
      let sum = 0;
      for (const shares of level.shares) sum += shares[i];
      const scale = LANE / Math.max(sum, 255);
      let y = top + LANE;
      level.shares.forEach((shares, phase) => {
        if (!shares[i]) return;
        const high = Math.max(shares[i] * scale, 1);
        y = Math.max(y - high, top);
        g.fillStyle = colours[data.phases[phase]];
        g.fillRect(left, y, right - left, high);
      });
    }
  }

  function drawAxis(g, width, top, x) {
    const span = view[1] - view[0];
    const wanted = span / Math.max(width / 110, 2);
    let step = SECONDS.map((s) => s * 1e6).find((us) => us >= wanted);
    if (wanted < 2e7) {
      step = 10 ** Math.floor(Math.log10(wanted));
      step *= [1, 2, 5, 10].find((factor) => step * factor >= wanted * 0.999);
    }
    step = step || wanted;
    g.fillStyle = colours.quiet;
    g.strokeStyle = colours["strong-line"];
    let free = 0;
    for (let us = Math.ceil(view[0] / step) * step; us <= view[1]; us += step) {
      const at = x(us);
      g.beginPath();
      g.moveTo(at, top);
      g.lineTo(at, top + 5);
      g.stroke();
      const text = clock(us, step);
      const half = g.measureText(text).width / 2;
      const left = Math.max(0, Math.min(at - half, width - 2 * half));
      if (left < free) continue;
      g.fillText(text, left, top + 18);
      free = left + 2 * half + 8;
    }
  }

  function drawCounter(g, counter, top, width, x) {
    g.fillStyle = colours.quiet;
    const unit = counter.unit ? ` ${counter.unit}` : "";
    const of = counter.device ? `, ${counter.device}` : "";
    g.fillText(`${counter.name}, 0 to ${counter.top}${unit}${of}`, 0, top - 5);
    g.strokeStyle = colours.line;
    g.strokeRect(0.5, top + 0.5, width - 1, COUNTER - 1);
    const level = levelFor(counter.levels, width);
    const bin = data.spanUs / level.bins;
    const first = Math.max(Math.floor(view[0] / bin), 0);
    const last = Math.min(Math.ceil(view[1] / bin), level.bins);
    const low = Math.min(counter.least, 0), high = Math.max(counter.greatest, low + 1e-12);
    const y = (stored) => {
      const value = counter.least + stored / (MISSING - 1) * (counter.greatest - counter.least);
      return top + COUNTER - (value - low) / (high - low) * (COUNTER - 2) - 1;
    };
    if (level.least && level.greatest) {
      g.fillStyle = colours.link;
      g.globalAlpha = 0.3;
      for (let i = first; i < last; i++) {
        if (level.least[i] === MISSING) continue;
        const upper = y(level.greatest[i]);
        g.fillRect(x(i * bin), upper, Math.max(x((i + 1) * bin) - x(i * bin), 0.5), Math.max(y(level.least[i]) - upper, 0.5));
      }
      g.globalAlpha = 1;
    }
    g.strokeStyle = colours.link;
    g.lineWidth = 1.3;
    g.beginPath();
    let pen = false;
    for (let i = first; i < last; i++) {
      if (level.mean[i] === MISSING) { pen = false; continue; }
      const at = y(level.mean[i]);
      if (pen) g.lineTo(x(i * bin), at); else g.moveTo(x(i * bin), at);
      g.lineTo(x((i + 1) * bin), at);
      pen = true;
    }
    g.stroke();
    g.lineWidth = 1;
  }

  function drawPicked(g, x) {
    if (!picked) return;
    const rows = data.lanes[picked.lane].rows;
    const left = x(rows.start[picked.place]);
    const wide = Math.max(x(rows.start[picked.place] + rows.span[picked.place]) - left, 2);
    g.strokeStyle = colours.text;
    g.lineWidth = 2;
    g.strokeRect(left, laneTop(picked.lane) - 1, wide, LANE + 2);
    g.lineWidth = 1;
  }

  // What is at a point of the canvas, in words.
  function passWords(rows, place) {
    const parts = [
      `${data.phases[rows.phase[place]]}, step ${rows.step[place]}, ${duration(rows.span[place])}`,
      `at ${clock(rows.start[place], 1e3)}`,
      `${rows.sequences[place]} sequences, ${rows.prefill[place]} prompt and ${rows.decode[place]} output tokens`,
    ];
    const status = data.status[rows.status[place]];
    if (status) parts.push(`not counted: ${status}`);
    return parts.join("\n");
  }

  function passAt(lane, us) {
    const rows = lane.rows;
    if (!rows) return -1;
    for (let i = firstNotBelow(rows.start, us + 1) - 1; i >= 0; i--) {
      if (rows.start[i] + rows.span[i] >= us) return i;
      if (rows.start[i] + rows.longest < us) break;
    }
    return -1;
  }

  function wordsAt(px, py) {
    const width = canvas.clientWidth;
    const us = view[0] + px / width * (view[1] - view[0]);
    for (let place = 0; place < data.lanes.length; place++) {
      const lane = data.lanes[place], top = laneTop(place);
      if (py < top || py > top + LANE) continue;
      const [first, last] = lane.rows ? inView(lane.rows) : [0, Infinity];
      if (isSingle(lane, first, last, width)) {
        const found = passAt(lane, us);
        return found < 0 ? `no pass at ${clock(us, 1e3)}` : passWords(lane.rows, found);
      }
      const level = levelFor(lane.levels, width), bin = data.spanUs / level.bins;
      const i = Math.min(Math.max(Math.floor(us / bin), 0), level.bins - 1);
      const shares = level.shares
        .map((shares, phase) => [data.phases[phase], shares[i]])
        .filter((entry) => entry[1])
        .map((entry) => `${entry[0]} ${Math.max(Math.round(entry[1] / 2.55), 1)} %`);
      return `${duration(bin)} from ${clock(i * bin, bin)}\n${level.begun[i]} passes begin\n${shares.join(", ") || "no pass"}`;
    }
    for (let place = 0; place < data.counters.length; place++) {
      const counter = data.counters[place], top = counterTop(place);
      if (py < top - LABEL || py > top + COUNTER) continue;
      const level = levelFor(counter.levels, width), bin = data.spanUs / level.bins;
      const i = Math.min(Math.max(Math.floor(us / bin), 0), level.bins - 1);
      const value = (stored) => {
        const real = counter.least + stored / (MISSING - 1) * (counter.greatest - counter.least);
        return `${Number(real.toPrecision(3)).toLocaleString("en")}${counter.unit ? ` ${counter.unit}` : ""}`;
      };
      const when = `${duration(bin)} from ${clock(i * bin, bin)}`;
      if (level.mean[i] === MISSING) return `${counter.name}: not sampled\n${when}`;
      const range = level.least && level.greatest && level.least[i] !== level.greatest[i]
        ? ` (${value(level.least[i])} to ${value(level.greatest[i])})` : "";
      return `${counter.name}: ${value(level.mean[i])}${range}\n${when}`;
    }
    return "";
  }

  // --- moving and zooming ---

  function show(from, to) {
    const span = Math.min(Math.max(to - from, 20), data.spanUs);
    const begin = Math.min(Math.max((from + to - span) / 2, 0), data.spanUs - span);
    view = [begin, begin + span];
    hideTip();
    redraw();
  }
  function zoom(factor, share = 0.5) {
    const span = view[1] - view[0], at = view[0] + share * span;
    const wide = Math.min(Math.max(span * factor, 20), data.spanUs);
    const begin = Math.min(Math.max(at - share * wide, 0), data.spanUs - wide);
    show(begin, begin + wide);
  }
  const move = (share) => {
    const by = share * (view[1] - view[0]);
    const span = view[1] - view[0];
    const begin = Math.min(Math.max(view[0] + by, 0), data.spanUs - span);
    show(begin, begin + span);
  };
  const actions = {
    in: () => zoom(0.5), out: () => zoom(2), left: () => move(-0.25), right: () => move(0.25),
    all: () => show(0, data.spanUs),
  };
  const keys = {
    ArrowLeft: "left", ArrowRight: "right", ArrowUp: "in", ArrowDown: "out", "+": "in", "-": "out", Home: "all",
  };

  function pick(step) {
    const lane = data.lanes.findIndex((each) => each.rows && each.rows.start.length);
    if (lane < 0) return;
    const rows = data.lanes[lane].rows;
    let place = picked ? picked.place + step : firstNotBelow(rows.start, view[0]);
    place = Math.min(Math.max(place, 0), rows.start.length - 1);
    picked = { lane, place };
    const begin = rows.start[place], end = begin + rows.span[place];
    if (begin < view[0] || end > view[1]) {
      const span = Math.max(view[1] - view[0], (end - begin) * 1.2);
      show((begin + end - span) / 2, (begin + end + span) / 2);
    } else redraw();
    const box = canvas.getBoundingClientRect();
    const share = ((begin + end) / 2 - view[0]) / (view[1] - view[0]);
    showTip(passWords(rows, place), box.left + share * box.width, box.top + laneTop(lane) + LANE);
  }

  function listen() {
    for (const button of document.querySelectorAll("[data-do]")) {
      button.addEventListener("click", actions[button.dataset.do]);
    }
    canvas.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "Escape") { picked = null; hideTip(); redraw(); return; }
      if (event.key === "," || event.key === ".") { pick(event.key === "." ? 1 : -1); return; }
      const action = keys[event.key];
      if (!action) return;
      event.preventDefault();
      actions[action]();
    });
    canvas.addEventListener("wheel", (event) => {
      // Without a key the wheel moves the page, as everywhere.
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      const box = canvas.getBoundingClientRect();
      zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 200))), (event.clientX - box.left) / box.width);
    }, { passive: false });
    canvas.addEventListener("dblclick", (event) => {
      const box = canvas.getBoundingClientRect();
      zoom(0.25, (event.clientX - box.left) / box.width);
    });
    const fingers = new Map();
    canvas.addEventListener("pointerdown", (event) => {
      fingers.set(event.pointerId, event.clientX);
      canvas.setPointerCapture(event.pointerId);
      canvas.classList.add("dragged");
    });
    canvas.addEventListener("pointermove", (event) => {
      const box = canvas.getBoundingClientRect();
      const before = fingers.get(event.pointerId);
      if (before === undefined) {
        const words = wordsAt(event.clientX - box.left, event.clientY - box.top);
        if (words) showTip(words, event.clientX, event.clientY); else hideTip();
        return;
      }
      if (fingers.size === 2) {
        const other = [...fingers].find((each) => each[0] !== event.pointerId)[1];
        const was = Math.abs(before - other), is = Math.abs(event.clientX - other);
        if (was > 5 && is > 5) zoom(was / is, ((event.clientX + other) / 2 - box.left) / box.width);
      } else {
        move((before - event.clientX) / box.width);
      }
      fingers.set(event.pointerId, event.clientX);
    });
    const lift = (event) => {
      fingers.delete(event.pointerId);
      if (!fingers.size) canvas.classList.remove("dragged");
    };
    canvas.addEventListener("pointerup", lift);
    canvas.addEventListener("pointercancel", lift);
    canvas.addEventListener("pointerleave", hideTip);
    canvas.addEventListener("blur", hideTip);
    for (const button of document.querySelectorAll("button.show")) {
      button.hidden = false;
      button.addEventListener("click", () => {
        const from = Number(button.dataset.from), to = Number(button.dataset.to);
        const around = Math.max((to - from) * 0.2, 100);
        show(from - around, to + around);
        byId("timeline").scrollIntoView();
        canvas.focus({ preventScroll: true });
      });
    }
    new ResizeObserver(redraw).observe(canvas);
    // Print is light, whatever the screen is.
    const print = matchMedia("print");
    print.addEventListener("change", () => draw());
    addEventListener("beforeprint", () => draw());
    addEventListener("afterprint", () => draw());
  }

  async function begin() {
    try {
      const directory = JSON.parse(byId("timeline-directory").textContent);
      ready(directory, await bytesOf(byId("timeline-columns").textContent.trim()));
      byId("timeline-box").hidden = false;
      draw();
      listen();
      root.dataset.ready = "yes";
      performance.mark("timeline");
    } catch (error) {
      const note = byId("timeline-error");
      note.textContent = `The timeline cannot be drawn: ${error.message}`;
      note.hidden = false;
      root.dataset.ready = "failed";
    }
  }
  begin();
})();
