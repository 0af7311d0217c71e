//! `elastic-trainer checkpoint`: a folder of checkpoints, as people look at it and tidy it up.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::num::{NonZeroU64, NonZeroUsize};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use clap::{Subcommand, ValueEnum};
use serde::Serialize;
use serde_json::json;

use super::disk::{Disk, Host};
use super::final_save::{self, FinalSaveError};
use super::manifest::{Entry, Manifest};
use super::retention::{Name, Retention};
use super::{Checkpoints, Loaded, MANIFEST, tensors};

/// What to do with checkpoints. DIR is the folder that `--checkpoint-dir` names, or one checkpoint's in it.
#[derive(Debug, Clone, Subcommand)]
pub enum Command {
    /// List checkpoints, oldest first, and check that their files are complete in length (not their contents)
    List {
        /// The folder
        dir: PathBuf,
        /// How to print
        #[arg(short, long, value_enum, default_value_t)]
        output: Output,
    },
    /// Read checkpoints completely and compare every checksum
    Verify {
        /// The folder
        dir: PathBuf,
    },
    /// Write the parameters of the newest whole checkpoint (or of the one that DIR or --step names) to one safetensors
    /// file
    ///
    /// Python: safetensors.torch.load_file(FILE)
    #[command(verbatim_doc_comment)]
    Export {
        /// The folder
        dir: PathBuf,
        /// The file to write; it must not exist
        file: PathBuf,
        /// The step to export
        #[arg(long)]
        step: Option<u64>,
        /// Include the optimizer's state
        #[arg(long)]
        state: bool,
    },
    /// Remove old and incomplete checkpoints, but not the last one known to be committed, the newest whole one, or any
    /// newer one
    ///
    /// A job resumes from the checkpoint that it has committed. The file DIR/committed names the newest one that its
    /// workers know to be committed. If the file is missing, `elasticctl describe` shows the step.
    Prune {
        /// The folder
        dir: PathBuf,
        /// Number of newest whole checkpoints to keep
        #[arg(long, value_name = "COUNT", default_value = "2")]
        keep: NonZeroUsize,
        /// Also keep the first whole one of every STEPS steps
        #[arg(long, value_name = "STEPS")]
        every: Option<NonZeroU64>,
        /// Only print what would be removed
        #[arg(long)]
        dry_run: bool,
    },
    /// Save the newest snapshot in an agent's memory (standard input); agents run this when a job ends without workers
    ///
    /// Prints the checkpoint as a line of JSON once it is durable; prints nothing if there is nothing newer.
    #[command(hide = true)]
    Rescue {
        /// The folder
        #[arg(long)]
        dir: PathBuf,
        /// The committed step
        #[arg(long, value_name = "STEP", default_value_t = 0)]
        after: u64,
    },
}

/// How to print a list.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// For people
    #[default]
    Table,
    /// For programs
    Json,
}

/// Why it could not be done.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// There is no such folder.
    #[error("cannot read {}: {cause}", dir.display())]
    Unreadable {
        /// What was named.
        dir: PathBuf,
        /// Why.
        cause: io::Error,
    },
    /// A folder, but of something else.
    #[error("{} holds no checkpoints: their folders are called like step-00000120-r3; name the folder that \
        --checkpoint-dir named", .0.display())]
    NoCheckpoints(PathBuf),
    /// There is no such step.
    #[error("{} holds no checkpoint of step {step}; it has steps {has}", dir.display())]
    NoSuchStep {
        /// The folder.
        dir: PathBuf,
        /// What was asked for.
        step: u64,
        /// What there is.
        has: String,
    },
    /// There is nothing that could be relied on.
    #[error("none of the checkpoints in {} is whole; `elastic-trainer checkpoint verify` says why", .0.display())]
    NoneWhole(PathBuf),
    /// Some are damaged.
    #[error("{bad} of {all} checkpoints in {} cannot be loaded", dir.display())]
    Damaged {
        /// The folder.
        dir: PathBuf,
        /// How many are damaged.
        bad: usize,
        /// And how many there are.
        all: usize,
    },
    /// The one that was asked for is damaged.
    #[error("cannot load {name}: {cause}")]
    Broken {
        /// Its folder's name.
        name: Name,
        /// What is wrong.
        cause: String,
    },
    /// A file would be overwritten.
    #[error("{} already exists; remove it, or choose another name", .0.display())]
    Exists(PathBuf),
    /// The file cannot be written.
    #[error("cannot write {}: {cause}", file.display())]
    Unwritable {
        /// The file.
        file: PathBuf,
        /// Why.
        cause: io::Error,
    },
    /// Some could not be removed.
    #[error("cannot remove {}: {cause}", path.display())]
    Unremovable {
        /// Its folder.
        path: PathBuf,
        /// Why.
        cause: io::Error,
    },
    /// What is in memory cannot be saved.
    #[error(transparent)]
    Rescue(#[from] FinalSaveError),
    /// The output cannot be written.
    #[error("cannot print: {0}")]
    Print(#[from] io::Error),
}

/// Does it, and prints what there is to say to `out`.
pub fn run(command: &Command, out: &mut dyn Write) -> Result<(), CommandError> {
    match carry_out(command, out) {
        // The reader of the pipe has seen enough.
        Err(CommandError::Print(error)) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result,
    }
}

fn carry_out(command: &Command, out: &mut dyn Write) -> Result<(), CommandError> {
    match command {
        Command::List { dir, output } => list(&Folder::open(dir)?, *output, out),
        Command::Verify { dir } => verify(&Folder::open(dir)?, out),
        Command::Export { dir, file, step, state } => export(Folder::open(dir)?, file, *step, *state, out),
        Command::Prune { dir, keep, every, dry_run } => {
            let retention = Retention { keep: *keep, every: *every };
            prune(Folder::open(dir)?, &retention, *dry_run, out)
        }
        Command::Rescue { dir, after } => {
            let Some(saved) = final_save::save(io::stdin(), *after, dir)? else { return Ok(()) };
            serde_json::to_writer(&mut *out, &saved).map_err(io::Error::from)?;
            Ok(writeln!(out)?)
        }
    }
}

/// The checkpoints that a command is about.
pub(super) struct Folder {
    checkpoints: Checkpoints<Host>,
    names: BTreeSet<Name>,
}

impl Folder {
    pub(super) fn open(dir: &Path) -> Result<Folder, CommandError> {
        let dir = std::path::absolute(dir).unwrap_or_else(|_| dir.to_owned());
        let inside = Host.list(&dir).map_err(|cause| CommandError::Unreadable { dir: dir.clone(), cause })?;
        let own = dir.file_name().and_then(|name| Name::parse(&name.to_string_lossy()));
        if let (Some(name), Some(parent)) = (own, dir.parent()) {
            return Ok(Folder { checkpoints: Checkpoints::new(Host, parent), names: [name].into() });
        }
        let names: BTreeSet<Name> = inside.iter().filter_map(|name| Name::parse(name)).collect();
        if names.is_empty() {
            return Err(CommandError::NoCheckpoints(dir));
        }
        Ok(Folder { checkpoints: Checkpoints::new(Host, &dir), names })
    }

    fn dir(&self) -> PathBuf {
        self.checkpoints.folder().to_owned()
    }

    fn manifest_path(&self, name: Name) -> PathBuf {
        self.checkpoints.path(name).join(MANIFEST)
    }

    /// What it says of itself, if its files are there in full length; or why it is no checkpoint.
    fn look(&self, name: Name) -> Result<Manifest, String> {
        if !self.checkpoints.is_complete(name) {
            return Err("no manifest: its save was cut short, or is under way".to_owned());
        }
        let manifest = self.checkpoints.manifest(&self.manifest_path(name), None)?;
        let inside = Name { step: manifest.step, round: manifest.round };
        if inside == name { Ok(manifest) } else { Err(format!("its manifest is that of {inside}")) }
    }

    /// The same, once every byte has been read.
    fn verify(&self, name: Name) -> Result<Manifest, Vec<String>> {
        let manifest = self.look(name).map_err(|cause| vec![cause])?;
        let flaws = self.checkpoints.check(&self.manifest_path(name), &manifest, |_, _| ());
        let flaws = flaws.map_err(|error| vec![error.to_string()])?;
        if flaws.is_empty() { Ok(manifest) } else { Err(flaws.iter().map(ToString::to_string).collect()) }
    }

    /// The same, and what it holds.
    fn load(&self, name: Name) -> Result<Loaded, String> {
        self.look(name)?;
        self.checkpoints.load(&self.manifest_path(name), None).map_err(|error| error.to_string())
    }

    fn newest_whole(&self) -> Option<Name> {
        self.names.iter().rev().copied().find(|&name| self.verify(name).is_ok())
    }

    /// Since it was saved.
    fn age(&self, name: Name) -> Option<Duration> {
        let manifest = std::fs::metadata(self.manifest_path(name));
        let saved = manifest.or_else(|_| std::fs::metadata(self.checkpoints.path(name))).ok()?.modified().ok()?;
        SystemTime::now().duration_since(saved).ok()
    }
}

/// A line of the list.
#[derive(Serialize)]
struct Line {
    step: u64,
    round: u64,
    world_size: Option<u32>,
    /// Of all its files.
    bytes: Option<u64>,
    age_s: Option<u64>,
    whole: bool,
    /// Why it is not whole.
    problem: Option<String>,
    path: PathBuf,
}

fn list(folder: &Folder, output: Output, out: &mut dyn Write) -> Result<(), CommandError> {
    let line = |&name: &Name| {
        let looked = folder.look(name);
        let manifest = looked.as_ref().ok();
        Line {
            step: name.step,
            round: name.round,
            world_size: manifest.map(|manifest| manifest.world_size),
            bytes: manifest.map(size),
            age_s: folder.age(name).map(|age| age.as_secs()),
            whole: looked.is_ok(),
            path: folder.checkpoints.path(name),
            problem: looked.err(),
        }
    };
    let lines: Vec<Line> = folder.names.iter().map(line).collect();
    if output == Output::Json {
        serde_json::to_writer_pretty(&mut *out, &lines).map_err(io::Error::from)?;
        return Ok(writeln!(out)?);
    }
    writeln!(out, "{:>10}  {:>5}  {:>5}  {:>9}  {:>9}  STATE", "STEP", "ROUND", "WORLD", "SIZE", "AGE")?;
    for line in lines {
        let or_none = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        let world = or_none(line.world_size.map(|ranks| ranks.to_string()));
        let (size, age) = (or_none(line.bytes.map(bytes)), or_none(line.age_s.map(age)));
        let state = line.problem.as_deref().unwrap_or("whole");
        writeln!(out, "{:>10}  {:>5}  {world:>5}  {size:>9}  {age:>9}  {state}", line.step, line.round)?;
    }
    Ok(())
}

fn verify(folder: &Folder, out: &mut dyn Write) -> Result<(), CommandError> {
    let (mut bad, mut complete) = (0, 0);
    for &name in &folder.names {
        if !folder.checkpoints.is_complete(name) && folder.names.len() > 1 {
            writeln!(out, "{name}  no checkpoint: its save was cut short, or is under way")?;
            continue;
        }
        complete += 1;
        match folder.verify(name) {
            Ok(manifest) => {
                let chunks: usize = manifest.extents.iter().map(|extent| extent.crc32c.len()).sum();
                writeln!(out, "{name}  whole: {} in {chunks} chunks", bytes(size(&manifest)))?;
            }
            Err(flaws) => {
                bad += 1;
                flaws.iter().try_for_each(|flaw| writeln!(out, "{name}  bad: {flaw}"))?;
            }
        }
    }
    match (bad, complete) {
        (0, 0) => Err(CommandError::NoneWhole(folder.dir())),
        (0, _) => Ok(()),
        (bad, all) => Err(CommandError::Damaged { dir: folder.dir(), bad, all }),
    }
}

fn export(
    folder: Folder,
    file: &Path,
    step: Option<u64>,
    whole_state: bool,
    out: &mut dyn Write,
) -> Result<(), CommandError> {
    if file.exists() {
        return Err(CommandError::Exists(file.to_owned()));
    }
    let (name, loaded) = chosen(&folder, step)?;
    write_file(name, &loaded, file, whole_state, out)
}

/// The newest whole checkpoint in a folder, or that of a step, or the one that was named.
pub(super) fn chosen(folder: &Folder, step: Option<u64>) -> Result<(Name, Loaded), CommandError> {
    let asked_for = match step {
        Some(step) => Some(folder.names.iter().rev().find(|name| name.step == step).ok_or_else(|| {
            let has: BTreeSet<u64> = folder.names.iter().map(|name| name.step).collect();
            let has = has.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
            CommandError::NoSuchStep { dir: folder.dir(), step, has }
        })?),
        None => folder.names.first().filter(|_| folder.names.len() == 1),
    };
    match asked_for {
        Some(&name) => Ok((name, folder.load(name).map_err(|cause| CommandError::Broken { name, cause })?)),
        None => {
            let newest = folder.names.iter().rev().find_map(|&name| Some((name, folder.load(name).ok()?)));
            newest.ok_or_else(|| CommandError::NoneWhole(folder.dir()))
        }
    }
}

fn write_file(
    name: Name,
    loaded: &Loaded,
    file: &Path,
    whole_state: bool,
    out: &mut dyn Write,
) -> Result<(), CommandError> {
    let broken = |cause| CommandError::Broken { name, cause };
    let state: &[u8] = bytemuck::cast_slice(&loaded.state);
    let mut chosen = Vec::new();
    let mut data = Vec::new();
    for tensor in loaded.manifest.tensors.iter().filter(|tensor| whole_state || tensor.is_parameter()) {
        let piece = state.get(tensor.offset as usize..(tensor.offset + tensor.len) as usize);
        let piece = piece.ok_or_else(|| broken(format!("tensor {} lies outside its state", tensor.name)))?;
        chosen.push(Entry { offset: data.len() as u64, ..tensor.clone() });
        data.extend_from_slice(piece);
    }
    // The format that readers of PyTorch's tensors ask for; values are strings by the file's definition.
    let about = json!({"format": "pt", "job": loaded.manifest.job, "step": loaded.manifest.step.to_string()});
    let mut contents = tensors::header(&chosen, Some(about));
    contents.append(&mut data);
    let write = |file: &Path| {
        let parent = file.parent().unwrap_or(Path::new("/"));
        let mut disk = Checkpoints::new(Host, parent);
        disk.write_file(file, &contents)?;
        Host.sync_folder(parent)
    };
    let absolute = std::path::absolute(file).unwrap_or_else(|_| file.to_owned());
    write(&absolute).map_err(|cause| CommandError::Unwritable { file: file.to_owned(), cause })?;
    let (count, size) = (chosen.len(), bytes(contents.len() as u64));
    Ok(writeln!(out, "step {}: {count} tensors, {size}, in {}", name.step, file.display())?)
}

fn prune(mut folder: Folder, retention: &Retention, dry_run: bool, out: &mut dyn Write) -> Result<(), CommandError> {
    let newest = folder.newest_whole().ok_or_else(|| CommandError::NoneWhole(folder.dir()))?;
    // Newer ones may be committed, and word of that be on its way.
    let committed = folder.checkpoints.committed();
    let newest = committed.map_or(newest, |committed| newest.min(committed));
    let older = folder.names.iter().copied().filter(|&name| name <= newest);
    let (whole, broken): (BTreeSet<Name>, BTreeSet<Name>) = older.partition(|&name| folder.look(name).is_ok());
    let mut goes: BTreeSet<Name> = retention.superfluous(&whole).union(&broken).copied().collect();
    goes.retain(|name| Some(*name) != committed);
    for &name in &goes {
        let path = folder.checkpoints.path(name);
        if !dry_run {
            folder.checkpoints.discard(&path).map_err(|cause| CommandError::Unremovable { path, cause })?;
        }
        writeln!(out, "{} {name}", if dry_run { "would remove" } else { "removed" })?;
    }
    let stay = folder.names.len() - goes.len();
    Ok(writeln!(out, "{stay} {}", if dry_run { "would stay" } else { "stay" })?)
}

fn size(manifest: &Manifest) -> u64 {
    manifest.extents.iter().map(|extent| extent.file_len).sum()
}

/// In units of 1000.
pub(crate) fn bytes(count: u64) -> String {
    let scaled = |unit: f64, name: &str| format!("{:.1} {name}", count as f64 / unit);
    match count {
        0..1_000 => format!("{count} B"),
        1_000..1_000_000 => scaled(1e3, "kB"),
        1_000_000..1_000_000_000 => scaled(1e6, "MB"),
        _ => scaled(1e9, "GB"),
    }
}

fn age(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7_200 => format!("{} min", seconds / 60),
        7_200..172_800 => format!("{} h", seconds / 3_600),
        _ => format!("{} days", seconds / 86_400),
    }
}
