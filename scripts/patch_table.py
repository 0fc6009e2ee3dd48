"""The tables of patches in docs/horovod.md, made from the headers of the patches; run it to print both."""

from hvdtrain.horovod_build.patching import horovod_patches


def table(name: str) -> str:
    """Return the Markdown table of one set, "build" or "launcher"."""
    columns = ["patch", "what", *(["needed"] if name == "build" else []), "files", "why", "upstream"]
    rows = [columns, ["---"] * len(columns)]
    for patch in horovod_patches():
        if patch.name.startswith(f"{name}/"):
            needed = [patch.header["Needed"]] if name == "build" else []
            changed = ", ".join(f"`{diff.file}`" for diff in patch.files)
            title = f"`{patch.name.partition('/')[2]}`"
            rows.append(
                [
                    title,
                    patch.header["Subject"],
                    *needed,
                    changed,
                    patch.header["Why"],
                    patch.header["Upstream"],
                ]
            )
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows)


if __name__ == "__main__":
    print(table("build"), table("launcher"), sep="\n\n")
