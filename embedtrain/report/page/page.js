// Values under the pointer, texts of the map, and a search over the recipe. The page is complete without it.
"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("points").textContent);
  const tip = document.getElementById("tip");
  const SVG = "http://www.w3.org/2000/svg";

  const formatValue = (value, form) => {
    if (form === "fraction") return (value * 100).toFixed(1) + "%";
    if (form === "small") return value === 0 ? "0" : value.toExponential(1);
    if (form === "rate") return value >= 100 ? Math.round(value).toLocaleString("en") : value.toFixed(1);
    const size = Math.abs(value);
    if (value !== 0 && (size < 1e-3 || size >= 1e5)) return value.toExponential(1);
    return value.toFixed(size < 10 ? 4 : size < 1000 ? 2 : 0);
  };
  const nearest = (points, step) => {
    let low = 0, high = points.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (points[middle][0] < step) low = middle + 1; else high = middle;
    }
    return low > 0 && step - points[low - 1][0] <= points[low][0] - step ? low - 1 : low;
  };
  const row = (name, colour, value) => {
    const line = document.createElement("div"), label = document.createElement("span"), number = document.createElement("b");
    label.textContent = name;
    label.dir = "auto";
    label.className = "c" + colour;
    number.textContent = value;
    line.append(label, number);
    return line;
  };

  for (const figure of document.querySelectorAll("[data-chart]")) {
    const chart = charts[figure.dataset.chart], svg = figure.querySelector("svg.plot");
    const lines = chart.lines.filter((line) => line.points.length);
    if (!lines.length) continue;
    const [low, high, start, end] = chart.x, marker = document.createElementNS(SVG, "g");
    svg.append(marker);
    svg.setAttribute("tabindex", "0");
    let shownStep = null;
    const show = (step) => {
      const points = lines.map((line) => line.points[nearest(line.points, step)]);
      const [closest] = points.reduce((best, point) => (Math.abs(point[0] - step) < Math.abs(best[0] - step) ? point : best));
      const x = start + ((closest - low) / (high - low)) * (end - start);
      shownStep = closest;
      const rule = document.createElementNS(SVG, "path");
      rule.setAttribute("d", `M${x} ${chart.y[0]}V${chart.y[1]}`);
      rule.setAttribute("class", "cursor");
      marker.replaceChildren(rule);
      tip.replaceChildren(document.createTextNode("step " + closest.toLocaleString("en")));
      lines.forEach((line, number) => {
        const [pointStep, value, y] = points[number];
        // A run that ended long before has no value here.
        if (Math.abs(pointStep - closest) > (high - low) / 50 && lines.length > 1) return;
        const dot = document.createElementNS(SVG, "circle");
        dot.setAttribute("cx", start + ((pointStep - low) / (high - low)) * (end - start));
        dot.setAttribute("cy", y);
        dot.setAttribute("r", 3);
        dot.setAttribute("class", "dot c" + line.colour);
        marker.append(dot);
        tip.append(row(charts.several || lines.length > 1 ? line.name : "", line.colour, formatValue(value, chart.form)));
      });
      tip.hidden = false;
      const box = svg.getBoundingClientRect(), wide = document.documentElement.clientWidth;
      const left = box.left + (x / 380) * box.width;
      tip.style.left = Math.max(4, Math.min(left + 10, wide - tip.offsetWidth - 4)) + window.scrollX + "px";
      tip.style.top = box.top + window.scrollY - tip.offsetHeight + 6 + "px";
    };
    const hide = () => { tip.hidden = true; marker.replaceChildren(); };
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect(), x = ((event.clientX - box.left) / box.width) * 380;
      show(low + ((x - start) / (end - start)) * (high - low));
    });
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("blur", hide);
    svg.addEventListener("keydown", (event) => {
      if (event.key === "Escape") return hide();
      const steps = [...new Set(lines.flatMap((line) => line.points.map((point) => point[0])))].sort((a, b) => a - b);
      const here = shownStep === null ? steps.length - 1 : steps.indexOf(shownStep);
      const next = { ArrowLeft: here - 1, ArrowRight: here + 1, Home: 0, End: steps.length - 1 }[event.key];
      if (next === undefined) return undefined;
      event.preventDefault();
      return show(steps[Math.max(0, Math.min(steps.length - 1, next))]);
    });
  }

  for (const maps of document.querySelectorAll(".maps")) {
    const caption = maps.nextElementSibling;
    const showText = (target) => {
      const number = target && target.dataset.text;
      if (number === undefined) return;
      for (const element of maps.querySelectorAll(".on")) element.classList.remove("on");
      for (const element of maps.querySelectorAll(`[data-text="${CSS.escape(number)}"]`)) element.classList.add("on");
      caption.textContent = target.querySelector("title").textContent;
      caption.dir = "auto";
      caption.className = "pointed caption";
    };
    maps.addEventListener("pointerover", (event) => showText(event.target));
    maps.addEventListener("click", (event) => showText(event.target));
  }

  const find = document.getElementById("find"), only = document.getElementById("only");
  const search = () => {
    const query = find.value.trim().toLowerCase();
    let count = 0;
    for (const group of document.querySelectorAll("#recipe .group")) {
      let matches = 0;
      for (const line of group.querySelectorAll("tr")) {
        const fits = line.textContent.toLowerCase().includes(query) && !(only.checked && line.className === "default");
        line.hidden = !fits;
        matches += fits;
      }
      group.hidden = matches === 0;
      if (query || only.checked) group.open = matches > 0;
      count += matches;
    }
    document.getElementById("found").textContent = query || only.checked ? `${count} found` : "";
  };
  document.querySelector(".find").hidden = false;
  find.addEventListener("input", search);
  only.addEventListener("change", search);
})();
