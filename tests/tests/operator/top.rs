//! `elasticctl top` on a terminal of its own.

use std::io::{Read, Write};

use elastic_tests::prelude::*;
use rustix::fs::{Mode, OFlags};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};
use tokio::process::{Child, Command};

use super::{Scene, WITHIN, succeed};

/// A terminal with a program on it, and all that the program has drawn.
struct Screen {
    keyboard: File,
    terminal: File,
    drawn: Arc<Mutex<String>>,
    program: Child,
}

impl Screen {
    fn run(program: &str, args: &[&str]) -> Screen {
        let keyboard = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&keyboard).unwrap();
        unlockpt(&keyboard).unwrap();
        let name = ptsname(&keyboard, Vec::new()).unwrap();
        let terminal = File::from(rustix::fs::open(name, OFlags::RDWR | OFlags::NOCTTY, Mode::empty()).unwrap());
        let size = Winsize { ws_col: 120, ws_row: 30, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&terminal, size).unwrap();
        let end = || Stdio::from(terminal.try_clone().unwrap());
        let program = Command::new(binary(program))
            .args(args)
            .stdin(end())
            .stdout(end())
            .stderr(end())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let keyboard = File::from(keyboard);
        let drawn = Arc::<Mutex<String>>::default();
        let (mut output, drawing) = (keyboard.try_clone().unwrap(), Arc::clone(&drawn));
        // Ends with the terminal's last descriptor.
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = output.read(&mut bytes) {
                drawing.lock().unwrap().push_str(&String::from_utf8_lossy(&bytes[..count]));
            }
        });
        Screen { keyboard, terminal, drawn, program }
    }

    fn press(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).unwrap();
    }

    /// Waits until this is in a picture that was begun after now.
    async fn shows(&self, text: &str) {
        let begin = self.drawn.lock().unwrap().len();
        eventually(&format!("the screen shows {text:?}"), WITHIN, async || {
            let drawn = self.drawn.lock().unwrap();
            let new = drawn[begin..].split_once("\x1b[H").map_or("", |(_, new)| new);
            new.contains(text).then_some(())
        })
        .await;
    }

    async fn ends(&mut self) -> i32 {
        let ended = tokio::time::timeout(WITHIN, self.program.wait()).await.expect("it ends").unwrap();
        ended.code().expect("no signal ends it")
    }

    /// Whether the terminal shows the keys that are typed, as in a shell.
    fn is_as_before(&self) -> bool {
        let modes = tcgetattr(&self.terminal).unwrap().local_modes;
        modes.contains(LocalModes::ECHO | LocalModes::ICANON | LocalModes::ISIG)
            && self.drawn.lock().unwrap().trim_end().ends_with("\x1b[?1049l")
    }
}

#[tokio::test]
async fn jobs_are_drawn_as_they_change_and_the_terminal_is_given_back() {
    let scene = Scene::on_etcd(1, 2).await;
    let [a] = scene.nodes(["a"]).await;
    let mut screen = Screen::run("elasticctl", &["--etcd", &scene.address, "top"]);
    screen.shows("1 job, 1 running").await;
    screen.shows("train").await;

    let b = scene.node("b").await;
    screen.press("\r");
    screen.shows("2 here, 1 to 2 wanted").await;
    screen.press("\x1b");
    screen.shows("1 job, 1 running").await;
    screen.press("q");
    assert_eq!(screen.ends().await, 0);
    eventually("the terminal is as before", WITHIN, async || screen.is_as_before().then_some(())).await;

    let mut screen = Screen::run("elasticctl", &["--etcd", &scene.address, "top", "train"]);
    screen.shows("2 here, 1 to 2 wanted").await;
    let pid = rustix::process::Pid::from_raw(screen.program.id().unwrap() as i32).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert_eq!(screen.ends().await, 0);
    eventually("the terminal is as before", WITHIN, async || screen.is_as_before().then_some(())).await;
    succeed([a, b]).await;
}

#[tokio::test]
async fn while_etcd_does_not_answer_top_says_so() {
    let scene = Scene::on_etcd(1, 2).await;
    let mut screen = Screen::run("elasticctl", &["--etcd", &scene.address, "top"]);
    screen.shows("no jobs yet").await;
    let etcd = scene._etcd.as_ref().unwrap();
    etcd.pause().await;
    screen.shows("this may be old: ").await;
    etcd.resume();
    let node = scene.node("a").await;
    screen.shows("1 job, 1 running").await;
    // Ctrl-C is a key on such a terminal, and no signal.
    screen.press("\x03");
    assert_eq!(screen.ends().await, 0);
    succeed([node]).await;
}

#[tokio::test]
async fn without_a_terminal_top_says_what_to_use() {
    let scene = Scene::on_etcd(1, 2).await;
    let output = output("elasticctl", &["--etcd", &scene.address, "top"], WITHIN).await;
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && error.contains("elasticctl jobs prints the same once"), "{error}");
    assert!(output.stdout.is_empty());
}
