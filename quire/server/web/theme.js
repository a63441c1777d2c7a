// Before the first paint: the colours that were chosen here, if any; else those of the system.
(() => {
  let theme = null;
  try {
    theme = localStorage.getItem("quire.theme");
  } catch {
    // Storage is off: the system decides.
  }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
})();
