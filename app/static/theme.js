// The theme that was chosen here before, set before anything is drawn; without a choice the system's own goes.
// A classic script, since modules run only after the first paint.

(() => {
  const root = document.documentElement;
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");

  const chosen = localStorage.getItem("theme");
  if (chosen === "dark" || chosen === "light") root.dataset.theme = chosen;

  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches);

  addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const show = () => {
      button.textContent = isDark() ? "☾" : "☀";
      button.title = isDark() ? "Dark; switch to light" : "Light; switch to dark";
    };
    button.addEventListener("click", () => {
      root.dataset.theme = isDark() ? "light" : "dark";
      localStorage.setItem("theme", root.dataset.theme);
      show();
    });
    prefersDark.addEventListener("change", show);
    show();
  });
})();
