//! The commands in a document: its `sh` blocks, each with the line that says where it is run.

pub(super) struct Block {
    /// What its first line says, without the `#`: where it is run.
    pub(super) place: String,
    pub(super) script: String,
}

/// All blocks of a document, in order. Panics at one that does not say where it is run.
pub(super) fn blocks(document: &str) -> Vec<Block> {
    let mut found = Vec::new();
    let mut rest = document;
    while let Some((_, after)) = rest.split_once("\n```sh\n") {
        let (script, after) = after.split_once("\n```\n").expect("a block that ends");
        let place = script.lines().next().and_then(|line| line.strip_prefix("# "));
        let place = place.unwrap_or_else(|| panic!("a block does not say where it is run:\n{script}")).to_owned();
        found.push(Block { place, script: script.to_owned() });
        rest = after;
    }
    found
}
