// The dialog for a key. What is typed goes to this tab's session storage and nowhere else.

export class KeyDialog {
  /** `find(id)` finds the dialog's parts; `onChange()` is called after a key was taken or removed. */
  constructor(key, find, onChange) {
    this.key = key;
    this.dialog = find("key-dialog");
    this.field = find("key");
    this.note = find("key-note");
    this.usual = this.note.textContent;
    find("open-key").addEventListener("click", () => this.open());
    find("key-cancel").addEventListener("click", () => this.dialog.close());
    find("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      key.value = this.field.value.trim();
      this.dialog.close();
      onChange();
    });
  }

  /** Ask; `problem` says why, if it is not the user's own idea. */
  open(problem = null) {
    if (this.dialog.open) return;
    this.note.textContent = problem ? `${problem} ${this.usual}` : this.usual;
    this.field.value = this.key.value ?? "";
    this.dialog.showModal();
  }
}
