"use strict";
(function () {
  const element = document.getElementById("drawing");
  const legend = document.getElementById("legend");
  if (legend === null) { document.body.dataset.state = "ready"; return; }
  const drawing = JSON.parse(element.textContent);
  Bokeh.set_log_level("warn");

  const figures = () => Bokeh.documents.flatMap((drawn) => drawn.roots());
  const hidden = () => new Set(
    Array.from(legend.querySelectorAll("input[data-tag]:not(:checked)"), (input) => input.dataset.tag));

  function showChosen() {
    const off = hidden();
    for (const figure of figures()) {
      for (const renderer of figure.renderers) {
        renderer.visible = !renderer.tags.some((tag) => off.has(tag));
      }
    }
  }

  function chooseAxis() {
    const select = document.getElementById("axis");
    const label = select.options[select.selectedIndex].text;
    for (const figure of figures()) {
      for (const renderer of figure.renderers) {
        renderer.glyph.x = {field: select.value};
      }
      for (const axis of figure.below) { axis.axis_label = label; }
    }
    // the library applies the new places later
    requestAnimationFrame(() => requestAnimationFrame(() => {
      for (const figure of figures()) { figure.reset.emit(); }
    }));
  }

  // the library draws for the width of the screen, which paper does not have: on paper, pictures are shown
  function takePictures() {
    for (const view of Object.values(Bokeh.index)) {
      const place = view.el?.closest(".chart") ?? null;
      if (place === null) { continue; }
      if (place.nextElementSibling === null) { place.after(document.createElement("img")); }
      const picture = place.nextElementSibling;
      picture.className = "picture";
      picture.alt = "";
      picture.src = view.export("png", true).canvas.toDataURL();
    }
  }

  Bokeh.embed.embed_items(drawing.documents, drawing.items).then(() => {
    legend.addEventListener("change", (event) => {
      if (event.target.id === "axis") { chooseAxis(); } else { showChosen(); }
    });
    window.addEventListener("beforeprint", takePictures);
    document.body.dataset.state = "ready";
  });
})();
