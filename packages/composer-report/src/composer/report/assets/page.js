"use strict";
(() => {
  const page = JSON.parse(document.getElementById("data").textContent);
  const coarse = matchMedia("(pointer: coarse)").matches;
  const config = { displayModeBar: false, responsive: true, showTips: false, doubleClick: "reset+autosize" };
  let mode = "batch";

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const color = (slot) => css(`--c${slot}`);
  const clear = (hex, alpha) =>
    `rgba(${[1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16)).join(",")},${alpha})`;

  // The x axis of a series: the selected one, or batches if it is not available.
  const along = (xs) => xs[mode] || xs.batch;
  const unit = (chart) => {
    const known = chart.kind === "timeline" ? chart.end : chart.lines && chart.lines.length && chart.lines[0].xs;
    return known && known[mode] ? page.units[mode] : "batch";
  };

  function lineTraces(line) {
    const ink = color(line.slot);
    const traces = [];
    const base = { type: "scatter", mode: "lines", x: along(line.xs), name: line.name, hoverinfo: "skip" };
    const stroke = { color: ink, width: 1.8, dash: line.dash };
    if (line.low) {
      const edge = { color: clear(ink, 0.25), width: 0.8 };
      traces.push({ ...base, y: line.low, line: edge });
      traces.push({ ...base, y: line.high, line: edge, fill: "tonexty", fillcolor: clear(ink, 0.18) });
    } else if (line.smooth) {
      traces.push({ ...base, y: line.y, line: { color: clear(ink, 0.3), width: 1 } });
    }
    if (line.faint) {
      traces.push({ ...base, y: line.y, line: { color: clear(ink, 0.35), width: 1 } });
    } else {
      const few = line.points <= 40;
      traces.push({
        ...base, y: line.smooth || line.y, line: stroke, mode: few ? "lines+markers" : "lines",
        marker: { color: ink, size: line.points === 1 ? 8 : 4 }, hoverinfo: undefined,
        hovertemplate: "%{y:.5~g}",
      });
    }
    if (line.bad) {
      const y = new Array(line.num_bad).fill(0.015);
      traces.push({
        ...base, x: along(line.bad), y, yaxis: "y2", mode: "markers", hoverinfo: undefined,
        marker: { color: css("--bad"), symbol: "x", size: 6 }, hovertemplate: "NaN or infinite",
      });
    }
    return traces;
  }

  function barTraces(bars) {
    const ink = color(bars.slot);
    const at = along(bars.xs);
    const rows = bars.text.map(() => bars.row);
    const common = { name: "", hovertext: bars.text, hoverinfo: "text", cliponaxis: false };
    return [
      { ...common, type: "bar", orientation: "h", base: at.base, x: at.length, y: rows, width: 0.55, textposition: "none",
        marker: { color: clear(ink, 0.55), line: { width: 0 } } },
      { ...common, type: "scatter", mode: "markers", x: at.base, y: rows,
        marker: { symbol: "line-ns", size: 11, line: { color: ink, width: 1.6 } } },
    ];
  }

  function arrayTraces(chart) {
    const ink = color(chart.slot);
    const [zmin, zmax] = chart.range || [];
    if (!chart.values.shape) {
      return [{ type: "scatter", mode: "lines", y: chart.values, line: { color: ink, width: 1.8, shape: "hvh" },
        fill: "tozeroy", fillcolor: clear(ink, 0.18), hovertemplate: "%{x}: %{y:.5~g}<extra></extra>" }];
    }
    return [{ type: "heatmap", z: chart.values, zmin, zmax, colorscale: [[0, clear(ink, 0.06)], [1, ink]],
      hovertemplate: "row %{y}, column %{x}: %{z:.5~g}<extra></extra>",
      colorbar: { thickness: 10, outlinewidth: 0, tickfont: { color: css("--soft"), size: 11 } } }];
  }

  function layout(chart) {
    const ink = css("--soft");
    const rule = css("--line");
    const axis = { gridcolor: rule, zeroline: false, linecolor: rule, tickfont: { color: ink, size: 11 }, automargin: true };
    const title = { text: unit(chart), font: { color: ink, size: 11 }, standoff: 6 };
    const common = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false,
      margin: { l: 44, r: 10, t: 8, b: 36 }, dragmode: coarse ? false : "zoom",
      font: { family: getComputedStyle(document.body).fontFamily, color: css("--ink"), size: 12 },
      hoverlabel: { bgcolor: css("--bg"), bordercolor: rule, font: { color: css("--ink"), size: 12 } },
    };
    if (chart.kind === "timeline") {
      const end = 1.0 * decode(along(chart.end).base)[0];
      const rows = chart.labels.length;
      return {
        ...common, height: chart.height, barmode: "overlay", hovermode: "closest",
        xaxis: { ...axis, title, range: [-end * 0.015, end * 1.02], zeroline: false },
        yaxis: { ...axis, tickmode: "array", tickvals: [...chart.labels.keys()], ticktext: chart.labels,
          range: [rows - 0.4, -0.6], showgrid: false, fixedrange: true },
      };
    }
    if (chart.kind === "array") {
      const matrix = chart.values.shape && chart.values.shape.split(", ").map(Number);
      const [low, high] = chart.range || [0, 1];
      const whole = (count) => ({ ...axis, tickformat: "d", tick0: 0, dtick: Math.max(1, Math.ceil(count / 10)) });
      return {
        ...common, hovermode: "closest",
        xaxis: { ...whole(matrix ? matrix[1] : chart.rows), title: { ...title, text: matrix ? "column" : "index" } },
        yaxis: matrix ? { ...whole(matrix[0]), autorange: "reversed" }
          : { ...axis, range: [1.05 * Math.min(low, 0), 1.05 * Math.max(high, 0)] },
      };
    }
    const lines = chart.lines.filter((line) => !line.faint).length;
    const most = chart.lines.reduce((all, line) => decode(line.y).reduce((a, b) => (b > a ? b : a), all), 0);
    return {
      ...common, hovermode: lines <= 8 ? "x unified" : "closest",
      xaxis: { ...axis, title, hoverformat: ".6~g" },
      yaxis: { ...axis, type: chart.log ? "log" : "linear", exponentformat: most >= 1e4 ? "SI" : "power", nticks: 7 },
      yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
    };
  }

  function decode(packed) {
    const bytes = Uint8Array.from(atob(packed.bdata), (letter) => letter.charCodeAt(0));
    return packed.dtype === "i4" ? new Int32Array(bytes.buffer) : new Float32Array(bytes.buffer);
  }

  function draw(index) {
    const chart = page.charts[index];
    const traces = chart.kind === "timeline" ? chart.bars.flatMap(barTraces)
      : chart.kind === "array" ? arrayTraces(chart) : chart.lines.flatMap(lineTraces);
    return Plotly.react(`chart-${index}`, traces, layout(chart), config);
  }
  // One at a time, from the top, so that the page stays responsive. `data-drawn` is set when all are drawn.
  let turn = 0;
  async function drawAll() {
    const mine = ++turn;
    document.documentElement.removeAttribute("data-drawn");
    for (let index = 0; index < page.charts.length; index++) {
      await draw(index);
      await new Promise((done) => setTimeout(done));
      if (mine !== turn) return;
    }
    document.documentElement.setAttribute("data-drawn", page.charts.length);
  }

  for (const button of document.querySelectorAll("[data-x]")) {
    button.addEventListener("click", () => {
      mode = button.dataset.x;
      for (const other of document.querySelectorAll("[data-x]")) other.setAttribute("aria-pressed", other === button);
      drawAll();
    });
  }
  for (const button of document.querySelectorAll("[data-chart]")) {
    button.addEventListener("click", () => {
      const index = Number(button.dataset.chart.slice("chart-".length));
      page.charts[index].log = !page.charts[index].log;
      button.setAttribute("aria-pressed", page.charts[index].log);
      draw(index);
    });
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  matchMedia("print").addEventListener("change", () => page.charts.forEach((_, index) => draw(index)));  // immediately
  drawAll();
})();
