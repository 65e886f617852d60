"""The page's script: draws the plots, in the colours of the reader's system, and in light ones on paper."""

from __future__ import annotations

from typing import Final

SCRIPT: Final = """
(() => {
  const read = id => JSON.parse(document.getElementById(id).textContent);
  const plots = read("plots"), palettes = read("palettes");
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const config = {responsive: true, displaylogo: false, modeBarButtons:
    [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "autoScale2d", "resetScale2d"]]};
  const family = getComputedStyle(document.body).fontFamily;

  function colours(layout, palette) {
    const changes = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      "font.color": palette.ink, "font.family": family, "font.size": 13,
      "modebar.bgcolor": "rgba(0,0,0,0)", "modebar.color": palette.soft, "modebar.activecolor": palette.accent,
      "hoverlabel.bgcolor": palette.surface, "hoverlabel.bordercolor": palette.line,
      "hoverlabel.font.color": palette.ink, "hoverlabel.font.family": family, "hoverlabel.align": "left",
    };
    for (const axis of ["xaxis", "yaxis"]) {
      changes[axis + ".gridcolor"] = palette.line;
      changes[axis + ".linecolor"] = palette.soft;
      changes[axis + ".zerolinecolor"] = palette.soft;
    }
    (layout.shapes || []).forEach((shape, index) => {
      if (shape.layer === "below") changes[`shapes[${index}].line.color`] = palette.soft;
    });
    (layout.annotations || []).forEach((annotation, index) => {
      changes[`annotations[${index}].bgcolor`] = palette.page + "d0";
    });
    return changes;
  }

  function redraw(palette, onPaper) {
    for (const [id, figure] of Object.entries(plots)) {
      const {height} = figure.layout;
      const size = onPaper
        ? {width: 660, height: Math.min(height, 350), autosize: false} : {width: null, height, autosize: true};
      Plotly.relayout(id, {...colours(figure.layout, palette), ...size});
    }
  }

  const screen = () => palettes[dark.matches ? "dark" : "light"];
  for (const [id, figure] of Object.entries(plots)) Plotly.newPlot(id, figure.data, figure.layout, config);
  redraw(screen(), false);
  dark.addEventListener("change", () => redraw(screen(), false));

  let opened = [];
  window.addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details.printed:not([open])")];
    opened.forEach(each => { each.open = true; });
    redraw(palettes.light, true);
  });
  window.addEventListener("afterprint", () => {
    opened.forEach(each => { each.open = false; });
    redraw(screen(), false);
  });
})();
"""
