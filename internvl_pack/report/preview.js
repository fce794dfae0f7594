(function () {
  "use strict";
  document.documentElement.classList.add("js");
  function tell(event) {
    var seg = event.target.closest && event.target.closest(".seg");
    if (!seg) return;
    var tip = document.getElementById(seg.dataset.tip);
    if (tip) tip.textContent = seg.title || seg.dataset.title;
  }
  document.addEventListener("mouseover", tell);
  document.addEventListener("focusin", tell);
  document.addEventListener("click", function (event) {
    tell(event);
    var seg = event.target.closest(".seg");
    if (seg) {
      var target = document.getElementById(seg.hash.slice(1));
      if (target) target.open = true;
    }
    var button = event.target.closest("button[data-open]");
    if (button) {
      var open = button.dataset.open === "1";
      document.querySelectorAll("details.segment").forEach(function (d) { d.open = open; });
    }
  });
})();
