//! A part of a fleet in a process of its own. A process may have too few descriptors for ten thousand nodes, so each
//! holds a part of them; orders go to its standard input and answers come from its output, as JSON lines.

use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use elastic_rendezvous::time::Time;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::sync::mpsc;

use super::fleet::{Connections, Fleet, Manner};

/// The word that makes this program one.
pub(crate) const WORD: &str = "crew";

#[derive(Serialize, Deserialize)]
enum Order {
    /// These nodes come, at most so many on a rack.
    Come(Vec<String>, u32),
    /// Wait until all run in this round or later, of so many nodes.
    Run { at_least: u64, size: u32, begun: Duration, within: Duration },
    /// Say what they do.
    Look,
    /// All workers end well.
    Finish(Duration),
}

/// What nodes do.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Seen {
    /// So many have workers at work.
    pub(crate) at_work: u32,
    /// The newest round that one of them runs in.
    pub(crate) round: u64,
}

/// Such a process, as seen from the first. Dropped, it is killed.
pub(crate) struct Crew {
    process: Child,
    orders: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
    size: u32,
}

impl Crew {
    pub(crate) fn start(address: &str, size: u32, Manner { connections, over }: Manner) -> Result<Crew> {
        let connections = if connections == Connections::Shared { "shared" } else { "own" };
        let mut process = Command::new(std::env::current_exe()?)
            .args([WORD, address, &size.to_string(), connections, &over.as_millis().to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .context("start another process of this bench")?;
        let orders = process.stdin.take().context("its input")?;
        let answers = BufReader::new(process.stdout.take().context("its output")?).lines();
        Ok(Crew { process, orders, answers, size: 0 })
    }

    pub(crate) fn size(&self) -> u32 {
        self.size
    }

    /// Its process, while it runs.
    pub(crate) fn pid(&self) -> Option<u32> {
        self.process.id()
    }

    async fn ask<T: DeserializeOwned>(&mut self, order: &Order) -> Result<T> {
        let line = serde_json::to_string(order)? + "\n";
        self.orders.write_all(line.as_bytes()).await.context("the other process takes no order")?;
        let answer = self.answers.next_line().await?.context("the other process has ended")?;
        let answer: Result<T, String> = serde_json::from_str(&answer)?;
        answer.map_err(anyhow::Error::msg)
    }

    pub(crate) async fn come(&mut self, names: &[String], rack: u32) -> Result<()> {
        self.size = names.len() as u32;
        self.ask(&Order::Come(names.to_vec(), rack)).await
    }

    pub(crate) async fn run(
        &mut self,
        at_least: u64,
        size: u32,
        begun: Time,
        within: Duration,
    ) -> Result<Vec<Duration>> {
        self.ask(&Order::Run { at_least, size, begun: begun.since(Time::ZERO), within }).await
    }

    pub(crate) async fn look(&mut self) -> Result<Seen> {
        self.ask(&Order::Look).await
    }

    pub(crate) async fn finish(mut self, within: Duration) -> Result<()> {
        self.ask(&Order::Finish(within)).await
    }
}

/// The other end: this process holds a part of a job of this size, with the words after [`WORD`].
pub(crate) async fn serve(words: &[String]) -> Result<()> {
    let [address, size, connections, over] = words else { bail!("a crew takes an address, a size and how nodes come") };
    let connections = if connections == "shared" { Connections::Shared } else { Connections::Own };
    let manner = Manner { connections, over: Duration::from_millis(over.parse()?) };
    let mut fleet = Some(Fleet::new(address, size.parse()?, manner)?);
    let (hand_on, mut orders) = mpsc::unbounded_channel();
    std::thread::spawn(move || std::io::stdin().lines().map_while(|line| hand_on.send(line.ok()?).ok()).for_each(drop));
    while let Some(order) = orders.recv().await {
        let answer = carry_out(&mut fleet, serde_json::from_str(&order)?).await.map_err(|error| format!("{error:#}"));
        println!("{}", serde_json::to_string(&answer)?);
    }
    Ok(())
}

async fn carry_out(fleet: &mut Option<Fleet>, order: Order) -> Result<serde_json::Value> {
    let Some(here) = fleet else { bail!("the nodes have ended") };
    let answer = match order {
        Order::Come(names, rack) => {
            let racks = names.chunks(rack as usize).map(|names| here.come(names.to_vec(), here.manner.over));
            let racks = futures::future::try_join_all(racks).await?;
            here.racks.extend(racks);
            serde_json::Value::Null
        }
        Order::Run { at_least, size, begun, within } => {
            serde_json::to_value(here.run_here(at_least, size, Time::from_zero(begun), within).await?)?
        }
        Order::Look => serde_json::to_value(here.seen_here())?,
        Order::Finish(within) => {
            if let Some(fleet) = fleet.take() {
                fleet.finish_here(within).await?;
            }
            serde_json::Value::Null
        }
    };
    Ok(answer)
}
