//! Makes the mutated machines: copies the machines and the simulation, and puts every fault of the list in, each behind
//! a switch. So all of them are built once, and the sources that ship hold nothing of it.

#![allow(clippy::expect_used, clippy::panic)]

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

#[path = "src/list.rs"]
#[allow(dead_code, unreachable_pub)]
mod list;

use list::MUTANTS;

/// Batches so small that a handful of nodes needs several.
const SMALL: [(&str, &str); 2] = [
    ("const BATCH: usize = 100;", "const BATCH: usize = 2;"),
    ("MOST_EVICTIONS: usize = 50;", "MOST_EVICTIONS: usize = 2;"),
];

/// Modules of the machines' crate that have no mutants, and are used unchanged: values that other crates share.
const REAL: [&str; 3] = ["job", "kv", "time"];

fn main() {
    let here = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets it"));
    let (machines, simulation) = (here.join("../rendezvous/src"), here.join("tests/simulation"));
    for watched in [&machines, &simulation, &here.join("src/list.rs")] {
        println!("cargo::rerun-if-changed={}", watched.display());
    }
    let mut applied = 0;
    copy(&machines, &out.join("machines"), &mut |file, mut source| {
        for mutant in MUTANTS.iter().filter(|mutant| mutant.file == file) {
            let found = source.matches(mutant.from).count();
            assert!(
                found == 1,
                "the mutant {} is to change coordinator/rendezvous/src/{file} at\n\n{}\n\nwhich is there {found} \
                 times: bring coordinator/simulation/src/list.rs up to date",
                mutant.name,
                mutant.from
            );
            let switch = format!("crate::on({:?})", mutant.name);
            source = source.replacen(mutant.from, &mutant.to.replace("ON", &switch), 1);
            applied += 1;
        }
        for (from, to) in SMALL {
            source = source.replace(from, to);
        }
        for module in REAL {
            source =
                source.replace(&format!("pub mod {module};\n"), &format!("pub use elastic_rendezvous::{module};\n"));
        }
        // The machines' own tests run in their own crate.
        let source = source.replace("crate::", "crate::machines::").replace("crate::machines::on(", "crate::on(");
        source
            .replace("cfg(test)", "cfg(any())")
            .replace("#[cfg(not(test))]\n", "")
            .replace("#![forbid(unsafe_code)]\n", "")
    });
    assert!(applied == MUTANTS.len(), "a mutant names a file that is not under coordinator/rendezvous/src/");
    copy(&simulation, &out.join("simulation"), &mut |_, source| {
        source
            .replace("elastic_rendezvous::", "crate::machines::")
            .replace("elastic_node::requests::checkpoint", "crate::checkpoint")
    });

    let mut modules = module("machines", &out.join("machines/lib.rs"));
    for entry in fs::read_dir(&simulation).expect("the simulation is there").flatten() {
        let name = entry.file_name().to_string_lossy().trim_end_matches(".rs").to_owned();
        if name != "main" {
            let file = if entry.path().is_dir() { format!("{name}/mod.rs") } else { format!("{name}.rs") };
            modules += &module(&name, &out.join("simulation").join(file));
        }
    }
    fs::write(out.join("modules.rs"), modules).expect("OUT_DIR can be written");

    let mut tests = String::new();
    for mutant in MUTANTS.iter().filter(|mutant| !mutant.what.is_empty()) {
        writeln!(tests, "#[test]\nfn {}() {{\n    crate::found({:?});\n}}", mutant.name, mutant.name)
            .expect("a string takes all");
    }
    fs::write(out.join("tests.rs"), tests).expect("OUT_DIR can be written");
}

fn module(name: &str, file: &Path) -> String {
    format!("#[path = {:?}]\nmod {name};\n", file.display())
}

/// Copies a folder. `change` gets each file's path within the folder and its text, and returns the new text.
fn copy(from: &Path, to: &Path, change: &mut dyn FnMut(&str, String) -> String) {
    fn walk(root: &Path, from: &Path, to: &Path, change: &mut dyn FnMut(&str, String) -> String) {
        fs::create_dir_all(to).expect("OUT_DIR can be written");
        for entry in fs::read_dir(from).expect("the sources are there").flatten() {
            let (path, target) = (entry.path(), to.join(entry.file_name()));
            if path.is_dir() {
                walk(root, &path, &target, change);
            } else {
                let within = path.strip_prefix(root).expect("it lies there").to_string_lossy().into_owned();
                let source = fs::read_to_string(&path).expect("the sources are there");
                fs::write(&target, change(&within, source)).expect("OUT_DIR can be written");
            }
        }
    }
    // What an earlier build left must not be taken for a source.
    let _ = fs::remove_dir_all(to);
    walk(from, from, to, change);
}
