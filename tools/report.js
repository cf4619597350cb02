// Filters of the gallery: show the images with one kind of error, those with most of it first.
const cards = [...document.querySelectorAll(".card")];
for (const button of document.querySelectorAll(".filters button")) {
  button.addEventListener("click", () => {
    for (const other of document.querySelectorAll(".filters button")) {
      other.setAttribute("aria-pressed", String(other === button));
    }
    const kind = button.dataset.kind;
    for (const card of cards) {
      const count = kind === "all" ? 1 : Number(JSON.parse(card.dataset.errors)[kind] || 0);
      card.hidden = count === 0;
      card.style.order = kind === "all" ? "" : String(-count);
    }
  });
}
// A search through long tables.
for (const field of document.querySelectorAll("input[data-table]")) {
  field.addEventListener("input", () => {
    const wanted = field.value.toLowerCase();
    for (const row of document.querySelectorAll(`#${field.dataset.table} tbody tr`)) {
      row.hidden = !row.textContent.toLowerCase().includes(wanted);
    }
  });
}
