//! `elasticctl top`: all jobs on a terminal, as they change.
//!
//! | file | what it does |
//! |---|---|
//! | `screen.rs` | what is shown and what a key does, as pure functions |
//! | `terminal.rs` | the terminal: keys come from it, lines go to it |

mod screen;
mod terminal;

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use elastic_rendezvous::job::overview::Overview;
use elastic_rendezvous::job::{JobId, Keys};
use elastic_store::etcd::EtcdStore;
use elastic_store::{Mirror, Store};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::silence::{self, Silent};
use elastic_coordinator::operator::Operator;
use screen::{Next, Screen};
use terminal::Terminal;

/// Time between two pictures when nothing happens: the clock continues.
const TICK: Duration = Duration::from_secs(1);
/// Time between two pictures of jobs that change all the time.
const LEAST: Duration = Duration::from_millis(200);
/// How often the store is asked whether it is there, and which nodes of the open job are silent.
const CHECK: Duration = Duration::from_secs(3);

/// Why the store does not answer, and which nodes of the open job are silent.
type Asked = (Option<String>, Silent);

/// Shows the jobs until the operator has seen enough.
pub(crate) async fn run(etcd: &EtcdStore, prefix: &str, place: &str, job: Option<&str>) -> anyhow::Result<()> {
    let mut screen = Screen::new(place.to_owned());
    if let Some(job) = job {
        screen.open(Operator::new(Arc::new(etcd.clone()), prefix).job(job).await?.0);
    }
    let mut mirror = Mirror::open(etcd, &Keys::jobs(prefix)).await?;
    let mut overview = Overview::new(prefix);
    overview.take(mirror.next().await?);
    let (told, mut asked) = watch::channel(Asked::default());
    let (opened, open) = watch::channel(screen.opened().cloned());
    tokio::spawn(ask(etcd.clone(), prefix.to_owned(), open, told));

    let watch_for = |kind| signal(kind).context("watch for signals");
    let mut interrupt = watch_for(SignalKind::interrupt())?;
    let mut terminate = watch_for(SignalKind::terminate())?;
    let mut hangup = watch_for(SignalKind::hangup())?;
    let mut resized = watch_for(SignalKind::window_change())?;
    let mut terminal = Terminal::open().context("top draws on a terminal; elasticctl jobs prints the same once")?;
    loop {
        let (columns, rows) = terminal.size();
        let lines = {
            let (trouble, silent) = &*asked.borrow_and_update();
            let now = elastic_store::clock::epoch_ms();
            screen.draw((&overview, silent), trouble.as_deref(), columns, rows, now)
        };
        terminal.draw(&lines)?;
        tokio::select! {
            news = mirror.next() => {
                overview.take(news?);
                tokio::time::sleep(LEAST).await;
                while let Some(news) = mirror.try_next()? {
                    overview.take(news);
                }
            }
            key = terminal.key() => match screen.press(key, &overview) {
                Next::Show => {
                    let open = screen.opened();
                    opened.send_if_modified(|before| {
                        let another = before.as_ref() != open;
                        *before = open.cloned();
                        another
                    });
                }
                Next::Quit => return Ok(()),
            },
            () = tokio::time::sleep(TICK) => {}
            _ = resized.recv() => {}
            _ = asked.changed() => {}
            _ = interrupt.recv() => return Ok(()),
            _ = terminate.recv() => return Ok(()),
            _ = hangup.recv() => return Ok(()),
        }
    }
}

/// Asks the store now and then, and when a job is opened. A watch alone would only be silent while it is away.
async fn ask(etcd: EtcdStore, prefix: String, mut open: watch::Receiver<Option<JobId>>, told: watch::Sender<Asked>) {
    loop {
        let job = open.borrow_and_update().clone();
        let answer = match job {
            Some(job) => silence::look(&etcd, &Keys::new(&prefix, &job)).await,
            None => etcd.get(&Keys::jobs(&prefix)).await.map(|_| Silent::new()),
        };
        told.send_replace(match answer {
            Ok(silent) => (None, silent),
            Err(error) => (Some(error.to_string()), Silent::new()),
        });
        tokio::select! {
            () = tokio::time::sleep(CHECK) => {}
            opened = open.changed() => if opened.is_err() { return },
        }
    }
}
