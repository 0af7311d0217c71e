//! An agent that is a thread of the test.

use std::fs::File;
use std::io::{BufRead, BufReader, IoSlice, Write};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use elastic_proto::worker::{Assignment, Checkpoint, FailureClass, FromWorker, ToWorker};
use elastic_trainer::Environment;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::worker::{Worker, environment, free_port, wait_for};

/// How often this step was to be committed.
fn tries_of(heard: &[FromWorker], step: u64) -> usize {
    let of = |word: &&FromWorker| matches!(word, FromWorker::Commit { checkpoint, .. } if checkpoint.step == step);
    heard.iter().filter(of).count()
}

/// What an agent says to a commit.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Commits {
    Granted,
    Refused,
    /// No answer, as while the store cannot be reached.
    Unanswered,
    /// Each is refused for now, twice.
    AtTheThirdTry,
}

/// An agent that answers as agents do, and records what the worker says.
pub(crate) struct Agent {
    pub(crate) socket: PathBuf,
    pub(crate) heard: Arc<Mutex<Vec<FromWorker>>>,
    connections: Arc<Mutex<Vec<UnixStream>>>,
}

impl Agent {
    /// `resume` is the checkpoint that the job has committed before.
    pub(crate) fn start(
        folder: &Path,
        environment: &Environment,
        resume: Option<Checkpoint>,
        commits: Commits,
    ) -> Agent {
        Agent::with_memory(folder, environment, resume, commits, None)
    }

    /// An agent of a job that has had a failure.
    pub(crate) fn restarted(folder: &Path, place: &Assignment, commits: Commits) -> Agent {
        let welcome = Assignment { restart_count: 1, ..place.clone() };
        Agent::welcoming(folder.join("agent"), welcome, commits, None)
    }

    /// An agent that lends this file in memory, whatever size is asked for. Without a file it refuses.
    pub(crate) fn with_memory(
        folder: &Path,
        environment: &Environment,
        resume: Option<Checkpoint>,
        commits: Commits,
        memory: Option<File>,
    ) -> Agent {
        let socket = folder.join(format!("agent-{}-{}", environment.round, environment.rank));
        Agent::welcoming(socket, assignment(environment, resume), commits, memory)
    }

    fn welcoming(socket: PathBuf, place: Assignment, commits: Commits, memory: Option<File>) -> Agent {
        let listener = UnixListener::bind(&socket).unwrap();
        let heard = Arc::new(Mutex::new(Vec::new()));
        let connections = Arc::new(Mutex::new(Vec::new()));
        let agent = Agent { socket, heard: heard.clone(), connections: connections.clone() };
        let welcome = ToWorker::Welcome(place);
        // The thread ends with the worker's connection, or with the test's process if no worker connects.
        thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            connections.lock().unwrap().push(stream.try_clone().unwrap());
            for line in BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok) {
                let message: FromWorker = serde_json::from_str(&line).unwrap();
                let answer = match &message {
                    FromWorker::Register { .. } => Some(welcome.clone()),
                    FromWorker::Commit { id, checkpoint } => {
                        assert!(Path::new(&checkpoint.path).exists(), "durable before it is committed");
                        match commits {
                            Commits::Granted => Some(ToWorker::Committed { id: *id, step: checkpoint.step }),
                            Commits::Refused => Some(ToWorker::Error {
                                id: Some(*id),
                                message: "a later round began".to_owned(),
                                again: false,
                            }),
                            Commits::Unanswered => None,
                            Commits::AtTheThirdTry if tries_of(&heard.lock().unwrap(), checkpoint.step) < 2 => {
                                let message = "the store is away".to_owned();
                                Some(ToWorker::Error { id: Some(*id), message, again: true })
                            }
                            Commits::AtTheThirdTry => Some(ToWorker::Committed { id: *id, step: checkpoint.step }),
                        }
                    }
                    FromWorker::Memory { id, bytes, .. } => match &memory {
                        Some(memory) => {
                            memory.set_len(*bytes).unwrap();
                            send_with(&stream, &ToWorker::Memory { id: *id, bytes: *bytes }, memory);
                            None
                        }
                        None => Some(ToWorker::Error {
                            id: Some(*id),
                            message: "there is no memory to spare".into(),
                            again: false,
                        }),
                    },
                    _ => None,
                };
                heard.lock().unwrap().push(message);
                if let Some(answer) = answer {
                    // A worker that has ended needs no answer.
                    let _ = writeln!(&stream, "{}", serde_json::to_string(&answer).unwrap());
                }
            }
        });
        agent
    }

    pub(crate) fn say(&self, message: &ToWorker) {
        let mut stream = &self.connections.lock().unwrap()[0];
        // A worker that has ended needs no word.
        let _ = writeln!(stream, "{}", serde_json::to_string(message).unwrap());
    }

    pub(crate) fn heard<T>(&self, what: &str, pick: impl Fn(&FromWorker) -> Option<T>) -> T {
        wait_for(what, || self.heard.lock().unwrap().iter().rev().find_map(&pick))
    }

    pub(crate) fn forming(&self, round: u64, quiesce: Duration) {
        let (reason, quiesce_ms) = ("a test asks for it".to_owned(), quiesce.as_millis() as u64);
        self.say(&ToWorker::Forming { round, reason, quiesce_ms });
    }

    /// Waits until the worker has quiesced for this round. Returns the step after which it did.
    pub(crate) fn quiesced(&self, wanted: u64) -> u64 {
        self.heard("the worker to quiesce", |message| match message {
            FromWorker::Quiesced { round, step } if *round == wanted => Some(*step),
            _ => None,
        })
    }

    pub(crate) fn last_commit(&self) -> Checkpoint {
        self.heard("a commit", |message| match message {
            FromWorker::Commit { checkpoint, .. } => Some(checkpoint.clone()),
            _ => None,
        })
    }

    /// All checkpoints that were to be committed.
    pub(crate) fn commits(&self) -> Vec<Checkpoint> {
        let heard = self.heard.lock().unwrap();
        let commits = heard.iter().filter_map(|message| match message {
            FromWorker::Commit { checkpoint, .. } => Some(checkpoint.clone()),
            _ => None,
        });
        commits.collect()
    }

    /// Gives the worker a place in a round that it has quiesced for.
    pub(crate) fn assign(&self, place: &Environment) {
        self.say(&ToWorker::Assignment(assignment(place, None)));
    }

    pub(crate) fn step_reached(&self, wanted: u64) -> u64 {
        self.heard("progress", |message| match message {
            FromWorker::Progress { step, .. } if *step >= wanted => Some(*step),
            _ => None,
        })
    }

    pub(crate) fn failure(&self) -> (FailureClass, String) {
        self.heard("the failure", |message| match message {
            FromWorker::Failing { class, message } => Some((*class, message.clone())),
            _ => None,
        })
    }
}

/// Says something, and sends a file with it.
fn send_with(stream: &UnixStream, message: &ToWorker, file: &File) {
    let line = format!("{}\n", serde_json::to_string(message).unwrap());
    let descriptors = [file.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
    let sent = sendmsg(stream, &[IoSlice::new(line.as_bytes())], &mut control, SendFlags::NOSIGNAL).unwrap();
    assert_eq!(sent, line.len());
}

/// The assignment with the same place as an environment. Each worker is on a node of its own.
pub(crate) fn assignment(environment: &Environment, resume: Option<Checkpoint>) -> Assignment {
    Assignment {
        job: environment.job.clone(),
        round: environment.round,
        rank: environment.rank,
        world_size: environment.world_size,
        group_rank: environment.rank,
        group_world_size: environment.world_size,
        master_addr: environment.master_addr.clone(),
        master_port: environment.master_port,
        restart_count: 0,
        nodes_per_replica: None,
        checkpoint: resume,
    }
}

/// Starts a worker group in which each worker has an agent.
pub(crate) fn start_group(
    folder: &Path,
    flags: &str,
    round: u64,
    world_size: u32,
    resume: Option<&Checkpoint>,
) -> Vec<(Agent, Worker)> {
    let port = free_port();
    (0..world_size)
        .map(|rank| start_member(folder, flags, environment(rank, world_size, round, port), resume))
        .collect()
}

/// Starts a worker with an agent.
pub(crate) fn start_member(
    folder: &Path,
    flags: &str,
    mut environment: Environment,
    resume: Option<&Checkpoint>,
) -> (Agent, Worker) {
    let agent = Agent::start(folder, &environment, resume.cloned(), Commits::Granted);
    environment.agent = Some(agent.socket.clone());
    let error_file = folder.join(format!("error-{}-{}.json", environment.round, environment.rank));
    let worker = Worker::start(flags, &environment, Some(&error_file));
    (agent, worker)
}

/// So many epochs that no test sees the end.
pub(crate) const ENDLESS: &str = "--epochs 100000 --hidden 16 --checkpoint-every 10 --keep 50";
