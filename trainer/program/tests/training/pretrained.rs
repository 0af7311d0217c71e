//! GPT-2 in and out of folders as `transformers` keeps it, and text from it. `make test-frameworks` has the real
//! `transformers`.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use elastic_models::{Gpt, gpt::pretrained::Pretrained};
use elastic_trainer::{Model, State};
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;

use crate::worker::train;

const SIZE: &str = "--context 16 --layers 2 --heads 2 --width 16";

fn program(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_elastic-trainer")).args(arguments).output().unwrap()
}

fn done(arguments: &[&str]) -> String {
    let output = program(arguments);
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn refused(arguments: &[&str]) -> String {
    let output = program(arguments);
    assert_eq!(output.status.code(), Some(1), "{arguments:?}");
    String::from_utf8(output.stderr).unwrap()
}

fn name(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A tensor's name, shape and numbers.
type Named = (String, Vec<usize>, Vec<f32>);

/// A folder with a text, the checkpoints of a model that has learned it, and its export.
struct Learned {
    folder: tempfile::TempDir,
    state: State,
}

impl Learned {
    fn new() -> Learned {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("text"), "A text that repeats itself. ".repeat(100)).unwrap();
        let path = |name: &str| folder.path().join(name).display().to_string();
        let flags = format!("gpt {SIZE} --lr 0.01 --max-steps 120 --text {}", path("text"));
        let state = train(&format!("{flags} --checkpoint-dir {}", path("checkpoints")), 1, 0);
        assert!(done(&["export", &path("checkpoints"), &path("export")]).contains("step 120: "));
        Learned { folder, state }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A folder with the export's tensors, changed.
    fn changed(&self, change: impl Fn(&str, Vec<usize>, Vec<f32>) -> Vec<Named>) -> PathBuf {
        let bytes = fs::read(self.path("export/model.safetensors")).unwrap();
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let changed: BTreeMap<String, (Vec<usize>, Vec<f32>)> = tensors
            .iter()
            .flat_map(|(name, view)| change(name, view.shape().to_vec(), bytemuck::pod_collect_to_vec(view.data())))
            .map(|(name, shape, numbers)| (name, (shape, numbers)))
            .collect();
        let views = changed.iter().map(|(name, (shape, numbers))| {
            let bytes = bytemuck::cast_slice(numbers);
            (name, TensorView::new(safetensors::Dtype::F32, shape.clone(), bytes).unwrap())
        });
        let folder = self.path("changed");
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir(&folder).unwrap();
        fs::copy(self.path("export/config.json"), folder.join("config.json")).unwrap();
        fs::write(folder.join("model.safetensors"), safetensors::serialize(views, header.metadata().clone()).unwrap())
            .unwrap();
        folder
    }
}

fn read(folder: &Path) -> Result<Vec<f32>, String> {
    let found = Pretrained::open(folder).map_err(|error| error.to_string())?;
    found.read().map_err(|error| error.to_string())
}

/// Columns for rows.
fn turned(shape: &[usize], numbers: &[f32]) -> Vec<f32> {
    let [rows, columns] = shape[..] else { unreachable!() };
    (0..columns).flat_map(|c| (0..rows).map(move |r| numbers[r * columns + c])).collect()
}

#[test]
fn an_export_comes_back_with_the_same_bits_and_is_trained_on() {
    let learned = Learned::new();
    let export = learned.path("export");
    assert_eq!(read(&export).unwrap(), learned.state.parameters());
    assert_eq!(read(&export.join("model.safetensors")).unwrap(), learned.state.parameters());
    // Square weights have a row for each input too.
    let in_windows = |window| Gpt::of(Pretrained::open(&export).unwrap(), window);
    let gpt = in_windows(16);
    assert!(in_windows(8).activation_bytes(1) < gpt.activation_bytes(1), "shorter windows keep less");
    assert_eq!(gpt.size().heads, 2);
    let square = gpt.tensors().iter().find(|tensor| tensor.name.ends_with("h.1.attn.c_proj.weight")).unwrap();
    let bytes = fs::read(export.join("model.safetensors")).unwrap();
    let exported = SafeTensors::deserialize(&bytes).unwrap().tensor(&square.name).unwrap().data().to_vec();
    let ours = turned(&square.shape, &learned.state.parameters()[square.range.clone()]);
    assert_eq!(exported, bytemuck::cast_slice::<f32, u8>(&ours));

    // As other programs write it: without the prefix, with the head and with masks.
    let plain = learned.changed(|name, shape, numbers| {
        let name = name.strip_prefix("transformer.").unwrap();
        let more = match name {
            "wte.weight" => Some(("lm_head.weight".to_owned(), shape.clone(), numbers.clone())),
            "h.0.ln_1.weight" => Some(("h.0.attn.bias".to_owned(), vec![1, 1, 4, 4], vec![1.0; 16])),
            _ => None,
        };
        [(name.to_owned(), shape, numbers)].into_iter().chain(more).collect()
    });
    assert_eq!(read(&plain).unwrap(), learned.state.parameters());

    // Windows may be shorter than its context; the first loss is that of what was learned.
    let flags = format!("gpt --init-from {} --text {}", name(&export), name(&learned.path("text")));
    let one = train(&format!("{flags} --context 8 --max-steps 3"), 1, 0);
    assert!(one == train(&format!("{flags} --context 8 --max-steps 3"), 3, 0));
    let trace = learned.path("trace");
    train(&format!("{flags} --max-steps 1 --trace {}", name(&trace)), 1, 0);
    let first = crate::worker::trace(&trace).into_iter().find(|line| line["event"] == "step").unwrap();
    assert!(first["loss"].as_f64().unwrap() < 1.0, "{first}, and ln 256 is 5.5");
}

#[test]
fn a_transposed_weight_is_found_also_where_it_is_square() {
    let learned = Learned::new();
    let square = learned.changed(|name, shape, numbers| {
        let turns = name.ends_with("h.1.attn.c_proj.weight");
        let numbers = if turns { turned(&shape, &numbers) } else { numbers };
        vec![(name.to_owned(), shape, numbers)]
    });
    let error = read(&square).unwrap_err();
    assert!(error.contains("a square weight is transposed") && error.contains("model.safetensors"), "{error}");

    let linear = learned.changed(|name, shape, numbers| {
        let turns = name.ends_with("c_attn.weight");
        let numbers = if turns { turned(&shape, &numbers) } else { numbers };
        vec![(name.to_owned(), if turns { vec![shape[1], shape[0]] } else { shape }, numbers)]
    });
    let error = read(&linear).unwrap_err();
    assert!(error.contains("h.0.attn.c_attn.weight has shape [48, 16] instead of [16, 48]"), "{error}");
    assert!(error.contains("a row for each input"), "{error}");
}

#[test]
fn what_is_no_gpt_2_is_refused() {
    let learned = Learned::new();
    let without =
        learned.changed(
            |name, shape, numbers| {
                if name.ends_with("ln_f.bias") { vec![] } else { vec![(name.to_owned(), shape, numbers)] }
            },
        );
    assert!(read(&without).unwrap_err().contains("it has no tensor transformer.ln_f.bias"));
    let config = without.join("config.json");
    let text = fs::read_to_string(&config).unwrap();
    for (from, to, says) in [
        ("\"gpt2\"", "\"llama\"", "another model_type than GPT-2"),
        ("\"gelu_new\"", "\"relu\"", "another activation_function than GPT-2"),
        ("\"n_head\": 2", "\"n_head\": 3", "a width of 16 is not divisible by 3 heads"),
    ] {
        fs::write(&config, text.replace(from, to)).unwrap();
        let error = read(&without).unwrap_err();
        assert!(error.contains(says) && error.contains("changed"), "{error}");
    }
    fs::remove_file(&config).unwrap();
    assert!(read(&without).unwrap_err().contains("config.json: No such file"));
    assert!(read(Path::new("/nowhere")).unwrap_err().contains("/nowhere"));

    // And what is no checkpoint of a GPT is not exported.
    let digits = learned.path("digits");
    train(&format!("--hidden 8 --epochs 1 --checkpoint-dir {}", name(&digits)), 1, 0);
    let export = learned.path("more");
    assert!(refused(&["export", name(&digits), name(&export)]).contains("of another model than a GPT"));
    let error = refused(&["export", name(&learned.path("checkpoints")), name(&learned.path("export"))]);
    assert!(error.contains("cannot write") && error.contains("exists"), "{error}");
    assert!(!export.exists());
}

#[test]
fn text_is_generated_from_checkpoints_and_exports() {
    let learned = Learned::new();
    let (checkpoints, export) = (learned.path("checkpoints"), learned.path("export"));
    let greedy =
        |dir: &Path| done(&["generate", name(dir), "--prompt", "A text", "--tokens", "60", "--temperature", "0"]);
    // Longer than the context of 16
    let text = greedy(&checkpoints);
    assert!(text.starts_with("A text that repeats itself. A text that repeats"), "{text}");
    assert_eq!(greedy(&export), text);
    let seeded = |seed: &str| done(&["generate", name(&export), "--temperature", "3", "--seed", seed]);
    assert_eq!(seeded("1"), seeded("1"));
    assert_ne!(seeded("1"), seeded("2"));
    assert!(refused(&["generate", name(learned.folder.path())]).contains("holds no checkpoints"));
}

#[test]
fn a_model_of_tokens_generates_numbers() {
    let folder = tempfile::tempdir().unwrap();
    let dir = name(folder.path());
    train(&format!("gpt --vocabulary 16 --windows 100 --max-steps 2 --checkpoint-dir {dir}"), 1, 0);
    let printed = done(&["generate", dir, "--prompt", "3, 4", "--tokens", "5"]);
    let tokens: Vec<u32> = printed.split_whitespace().map(|word| word.parse().unwrap()).collect();
    assert!(tokens.len() == 7 && tokens.starts_with(&[3, 4]) && tokens.iter().all(|token| *token < 16), "{printed}");
    assert_eq!(done(&["generate", dir, "--prompt", " , ", "--tokens", "5"]).split_whitespace().count(), 6, "from 0 on");
    let export = folder.path().join("export");
    done(&["export", dir, name(&export)]);
    let error = refused(&["gpt", "--init-from", name(&export), "--text", name(&export.join("config.json"))]);
    assert!(error.contains("its tokens are not the bytes of a text"), "{error}");
    for wrong in ["16", "3,x"] {
        assert!(refused(&["generate", dir, "--prompt", wrong]).contains("numbers from 0 to 15"));
    }
}
