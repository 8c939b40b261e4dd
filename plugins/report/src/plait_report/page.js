// Draws the charts of `report` (made by plait_report.page) with plotly, and again when the x axis or the colors change.
const dark = matchMedia("(prefers-color-scheme: dark)");
const style = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function draw() {
  const axis = document.querySelector("input[name=x]:checked").value;
  for (const chart of report.charts) {
    const curves = chart.curves.map(curve => ({
      x: curve.x[axis], y: curve.y, name: curve.name, type: "scatter", connectgaps: false,
      mode: curve.marked || curve.y.length === 1 ? "lines+markers" : "lines",
      line: { color: report.colors[curve.run % report.colors.length], width: 1.7, dash: curve.dashed ? "dash" : curve.marked ? "dot" : "solid" },
      legendgroup: String(curve.run),
    }));
    const lines = { gridcolor: style("--line"), zerolinecolor: style("--line"), automargin: true, exponentformat: "power" };
    Plotly.react(chart.key, curves, {
      title: { text: chart.title, font: { size: 14 }, x: 0.02, xanchor: "left" },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: style("--text"), size: 12 },
      margin: { l: 50, r: 30, t: 40, b: 40 }, hovermode: "x unified", hoverlabel: { bgcolor: style("--card"), namelength: 30 },
      xaxis: { ...lines, title: { text: report.axes[axis], standoff: 6 } }, yaxis: { ...lines, title: { text: chart.unit } },
      showlegend: curves.length > 1 && curves.length <= 12, legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom", font: { size: 11 } },
      modebar: { orientation: "v", bgcolor: "rgba(0,0,0,0)", color: style("--dim"), activecolor: style("--text") },
    }, { responsive: true, displaylogo: false, modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]] });
  }
}

document.querySelectorAll("input[name=x]").forEach(input => input.addEventListener("change", draw));
dark.addEventListener("change", draw);
draw();
