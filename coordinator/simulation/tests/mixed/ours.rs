//! Our machine, carried in virtual time. Nothing is decided here.

use std::time::Duration;

use elastic_rendezvous::job::{Endpoint, Failure, FailureClass, NodeRecord, Spec, Timings, samples};
use elastic_rendezvous::time::Time;
use elastic_rendezvous::{Command, End, GroupReport, Outcome};
use elastic_torchelastic::{DEFAULT_PREFIX, Input, Output, Participant, ParticipantSetup, Paths};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};

use crate::network::Client;
use crate::world::{Exit, Seat, World};

/// What an operator asks of the agent.
pub(crate) enum Order {
    Drain,
}

pub(crate) struct Ours {
    pub(crate) world: World,
    pub(crate) client: Client,
    pub(crate) name: String,
    pub(crate) slots: u32,
    pub(crate) seed: u64,
    pub(crate) orders: UnboundedReceiver<Order>,
}

fn setup(world: &World, name: &str, slots: u32, seed: u64) -> ParticipantSetup {
    let endpoint = Endpoint { host: name.to_owned(), port: 1000 };
    let record = NodeRecord { slots, master: Some(endpoint), ..samples::node(name) };
    let timings = Timings { last_call: world.last_call, join_timeout: world.timeout, ..Timings::default() };
    let spec = Spec { max_restarts: 100_000, timings, ..samples::spec(world.min, world.max) };
    ParticipantSetup { record, spec, paths: Paths::new(DEFAULT_PREFIX, "job"), identical: false, seed }
}

/// An agent on its machine.
struct Carried {
    world: World,
    client: Client,
    name: String,
    machine: Participant,
    inputs: UnboundedSender<Input>,
    tasks: JoinSet<()>,
    port: u16,
    end: Option<End>,
}

impl Ours {
    pub(crate) async fn run(mut self) -> Exit {
        let (inputs, mut queue) = unbounded_channel();
        let mut carried = Carried {
            machine: Participant::new(setup(&self.world, &self.name, self.slots, self.seed)),
            world: self.world,
            client: self.client,
            name: self.name,
            inputs,
            tasks: JoinSet::new(),
            port: 1000,
            end: None,
        };
        carried.step(Input::Tick);
        loop {
            if let Some(end) = carried.end.take() {
                carried.world.stopped(&carried.name);
                return match end {
                    End::Succeeded => Exit::Succeeded,
                    End::Drained => Exit::Drained,
                    End::Failed(_, reason) | End::Refused(reason) | End::StoreLost(reason) => Exit::Ended(reason),
                    End::Closed => Exit::Closed,
                };
            }
            let deadline = carried.machine.deadline().map(|at| carried.world.instant(at));
            let tick = async {
                match deadline {
                    // As the driver does, so that what cannot be met does not spin.
                    Some(at) => sleep_until(at.max(Instant::now() + Duration::from_millis(1))).await,
                    None => std::future::pending().await,
                }
            };
            let input = tokio::select! {
                biased;
                Some(input) = queue.recv() => input,
                Some(Order::Drain) = self.orders.recv() => Input::Agent(GroupReport::Drain),
                () = tick => Input::Tick,
            };
            while carried.tasks.try_join_next().is_some() {}
            carried.step(input);
        }
    }
}

impl Carried {
    fn step(&mut self, input: Input) {
        let now: Time = self.world.now();
        for output in self.machine.step(now, input) {
            self.carry(output);
        }
    }

    fn carry(&mut self, output: Output) {
        let (client, inputs, world) = (self.client.clone(), self.inputs.clone(), self.world.clone());
        match output {
            Output::Ask(request) => {
                self.world.tell(&self.name, &format!("asks {request:?}"));
                self.tasks.spawn_local(async move {
                    let result = client.request(&request).await;
                    let _ = inputs.send(Input::Answered(result));
                });
            }
            Output::Refresh(upkeep, request) => {
                self.tasks.spawn_local(async move {
                    let sent = world.now();
                    let result = client.request(&request).await;
                    let _ = inputs.send(Input::Refreshed(upkeep, sent, result));
                });
            }
            Output::Watch(key, index) => {
                self.tasks.spawn_local(async move {
                    let result = client.wait(&key, index, None).await;
                    let _ = inputs.send(Input::News(result));
                });
            }
            Output::Agent(Command::Start(start)) => {
                let (round, rank) = (&start.round, &start.rank);
                let master = round.master.as_ref().map(ToString::to_string).unwrap_or_default();
                let seat = Seat {
                    version: round.number,
                    group_rank: rank.group_rank,
                    size: round.group_world_size,
                    first: rank.first_rank,
                    slots: rank.slots,
                    world_size: round.world_size,
                    master,
                };
                self.world.started(&self.name, seat, Some(inputs));
            }
            Output::Agent(Command::Stop(_)) => {
                self.world.stopping(&self.name);
                let name = self.name.clone();
                self.port += 1;
                let master = Some(Endpoint { host: name.clone(), port: self.port });
                self.tasks.spawn_local(async move {
                    sleep(client.up_to(Duration::from_millis(700))).await;
                    world.stopped(&name);
                    let _ = inputs.send(Input::Agent(GroupReport::Stopped { master }));
                });
            }
            Output::Agent(Command::Kill) => self.world.stopping(&self.name),
            Output::Agent(Command::Say(line)) => self.world.tell(&self.name, &line),
            Output::Agent(Command::Forming(_, reason)) => {
                self.world.tell(&self.name, &format!("gives up its place: {reason}"))
            }
            // No Participant quiesces or warms workers up.
            Output::Agent(_) => {}
            Output::End(end) => {
                self.world.tell(&self.name, &format!("ends: {end:?}"));
                self.end = Some(end);
            }
        }
    }
}

/// How the machine hears of its workers' end.
pub(crate) fn ended(version: u64, failed: Option<FailureClass>) -> Input {
    let outcome = match failed {
        None => Outcome::Done,
        Some(class) => Outcome::Failed(Failure::new(class, "a worker failed")),
    };
    Input::Agent(GroupReport::Ended { round: version, outcome })
}
