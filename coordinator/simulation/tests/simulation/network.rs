//! Pulses and dials between agents, as the driver in `node` does them.

use elastic_rendezvous::job::{LeaderRecord, NodeId};
use elastic_rendezvous::{LeaderInput, MemberInput};
use elastic_store::Revision;

use crate::dice::{MS, SECOND, seconds};
use crate::process::{Input, Stream};
use crate::world::{Happening, Mutation, World};

/// What a dial finds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Found {
    Dead,
    Alive,
    Unclear,
}

impl World {
    pub(crate) fn reachable(&self, from: usize, to: usize) -> bool {
        let (a, b) = (self.processes[from].host, self.processes[to].host);
        a == b || (self.hosts[a].up && self.hosts[b].up && !self.cuts.contains(&(a.min(b), a.max(b))))
    }

    /// How long a message of or to this process takes.
    pub(crate) fn hop(&mut self, p: usize) -> u64 {
        if self.scenario.late > 0.0 && self.goes_wrong(self.scenario.late) {
            let late = self.dice.between(400 * MS, 8 * SECOND);
            self.schedule(|| format!("a message of p{p} takes {}", seconds(late)));
            return late;
        }
        self.dice.mostly(3 * MS, 400 * MS)
    }

    /// Asks a port who is behind it.
    pub(crate) fn dial(&self, from: usize, port: u16, node: &NodeId) -> Found {
        let to = usize::from(port);
        let process = &self.processes[to];
        if !self.reachable(from, to) {
            return Found::Unclear;
        }
        match (process.alive, process.frozen) {
            (false, _) if process.tree.is_none() => Found::Dead,
            (true, false) if process.end.is_none() && process.id() == *node => Found::Alive,
            (true, false) if process.end.is_none() => Found::Dead,
            _ => Found::Unclear,
        }
    }

    pub(crate) fn open_pulse(&mut self, p: usize, target: Option<(Revision, LeaderRecord)>) {
        self.end_stream(p);
        if let Some((term, leader)) = target {
            let id = self.fresh();
            let stream =
                Stream { id, leader: leader.node, port: leader.peer.port, open: false, term, probe: 0, echo: None };
            self.processes[p].stream = Some(stream);
            let hop = self.hop(p);
            self.at(hop, Happening::Connect { p, stream: id });
        }
    }

    /// Ends a process's stream to its leader; the other side hears of it.
    pub(crate) fn end_stream(&mut self, p: usize) {
        if let Some(stream) = self.processes[p].stream.take()
            && stream.open
            && self.reachable(p, usize::from(stream.port))
        {
            let hop = self.hop(p);
            self.input_after(hop, usize::from(stream.port), Input::Closed { stream: stream.id });
        }
    }

    /// The stream broke: it is dialled, and opened again if its leader is alive.
    pub(crate) fn stream_broke(&mut self, p: usize) {
        let Some(mut stream) = self.processes[p].stream.clone() else { return };
        self.end_stream(p);
        stream.open = false;
        stream.id = self.fresh();
        let hop = self.hop(p);
        self.at(hop, Happening::Connect { p, stream: stream.id });
        self.processes[p].stream = Some(stream);
    }

    fn own_stream(&self, p: usize, id: u64) -> Option<Stream> {
        let process = &self.processes[p];
        process.stream.clone().filter(|stream| stream.id == id && process.alive)
    }

    pub(crate) fn connect(&mut self, p: usize, id: u64) {
        let Some(stream) = self.own_stream(p, id) else { return };
        if self.processes[p].frozen {
            return self.at(100 * MS, Happening::Connect { p, stream: id });
        }
        let to = usize::from(stream.port);
        let found = self.dial(p, stream.port, &stream.leader);
        match found {
            Found::Dead => {
                self.tell(|| format!("p{p} finds leader {} dead", stream.leader));
                self.processes[p].stream = None;
                self.soon(p, Input::Member(MemberInput::LeaderDead(stream.term)));
            }
            Found::Alive if self.processes[to].leader.is_some() => {
                if let Some(stream) = &mut self.processes[p].stream {
                    stream.open = true;
                }
                let node = self.processes[p].id();
                let hop = self.hop(p);
                self.input_after(hop, to, Input::Hello { from: p, stream: id, node });
                self.at(hop, Happening::Beat { p, stream: id });
            }
            _ => {
                let pause = self.dice.between(100 * MS, 300 * MS);
                self.at(pause, Happening::Connect { p, stream: id });
            }
        }
    }

    /// A member's beat is due.
    pub(crate) fn beat(&mut self, p: usize, id: u64) {
        let Some(stream) = self.own_stream(p, id).filter(|stream| stream.open) else { return };
        let every = self.processes[p].member.spec().timings.beat();
        let every = self.hosts[self.processes[p].host].clock.lasts(every);
        if !self.processes[p].frozen {
            self.send_beat(p, &stream);
        }
        self.at(every, Happening::Beat { p, stream: id });
    }

    pub(crate) fn send_beat(&mut self, p: usize, stream: &Stream) {
        let to = usize::from(stream.port);
        if !self.reachable(p, to) {
            return;
        }
        if !self.processes[to].alive {
            return self.stream_broke(p);
        }
        let (sent, node) = (self.local(p), self.processes[p].id());
        let hop = self.hop(p);
        self.input_after(
            hop,
            to,
            Input::Beat { from: p, stream: stream.id, node, sent, probe: stream.probe, echo: stream.echo },
        );
    }

    /// A process hears a member's beat, and answers if it leads.
    pub(crate) fn heard(&mut self, p: usize, input: Input) {
        match input {
            Input::Hello { from, stream, node } => {
                if self.processes[p].leader.is_none() {
                    return self.refuse(from, stream);
                }
                self.processes[p].streams.push((stream, from, node.clone()));
                self.lead(p, LeaderInput::Opened(node));
            }
            Input::Beat { from, stream, node, sent, probe, echo } => {
                if !self.processes[p].streams.iter().any(|(id, ..)| *id == stream) {
                    return self.refuse(from, stream);
                }
                self.lead(p, LeaderInput::Heard { node: node.clone(), probe, echo });
                let now = self.local(p);
                let Some(leader) = &self.processes[p].leader else { return };
                let (term, Some(mut word)) = (leader.term(), leader.word(now, &node)) else { return };
                if self.mutation == Some(Mutation::WordVouchesForAll) {
                    word.all_heard = Some(std::time::Duration::ZERO);
                }
                if self.reachable(p, from) && self.own_stream(from, stream).is_some() {
                    let hop = self.hop(p);
                    self.input_after(hop, from, Input::Word { stream, said: now, sent, term, word });
                }
            }
            Input::Word { stream, said, sent, term, word } => {
                // What was under way when the stream ended is still heard; an echo needs the stream.
                if let Some(mut own) = self.own_stream(p, stream) {
                    own.echo = own.echo.max(Some(said));
                    self.processes[p].stream = Some(own);
                }
                self.member(p, MemberInput::Word { sent, term, word });
            }
            Input::Closed { stream } => {
                let streams = &mut self.processes[p].streams;
                let Some(at) = streams.iter().position(|(id, ..)| *id == stream) else { return };
                let (_, _, node) = streams.remove(at);
                if !streams.iter().any(|(id, _, other)| *id > stream && *other == node) {
                    self.lead(p, LeaderInput::Closed(node));
                }
            }
            Input::Probe { stream, number } => {
                let Some(mut own) = self.own_stream(p, stream) else { return };
                own.probe = own.probe.max(number);
                self.processes[p].stream = Some(own.clone());
                self.send_beat(p, &own);
            }
            Input::Member(_) | Input::Leader(..) => unreachable!("not for the network"),
        }
    }

    /// A stream to a process that does not lead (any more) ends.
    fn refuse(&mut self, member: usize, stream: u64) {
        if self.own_stream(member, stream).is_some() {
            self.stream_broke(member);
        }
    }

    /// A leader's streams end with its term.
    pub(crate) fn end_streams_to(&mut self, p: usize) {
        for (stream, from, _) in std::mem::take(&mut self.processes[p].streams) {
            if self.own_stream(from, stream).is_some() && self.reachable(p, from) {
                self.stream_broke(from);
            }
        }
    }

    pub(crate) fn probe(&mut self, p: usize, number: u64) {
        for (stream, from, _) in self.processes[p].streams.clone() {
            if self.reachable(p, from) {
                let hop = self.hop(p);
                self.input_after(hop, from, Input::Probe { stream, number });
            }
        }
        let own = self.processes[p].id();
        let now = self.local(p);
        self.lead(p, LeaderInput::Heard { node: own, probe: number, echo: Some(now) });
    }

    /// A leader's driver dials until it is clear, within its patience.
    pub(crate) fn suspect(&mut self, p: usize, term: Revision, node: NodeId, port: u16, until: u64) {
        let leads = self.processes[p].leader.as_ref().is_some_and(|leader| leader.term() == term);
        if !leads || !self.processes[p].alive {
            return;
        }
        let found = match self.dial(p, port, &node) {
            Found::Unclear if self.mutation == Some(Mutation::HintsConfirm) => Found::Dead,
            found => found,
        };
        match found {
            Found::Dead => {
                self.tell(|| format!("p{p} finds {node} dead"));
                self.soon(p, Input::Leader(term, LeaderInput::Dead(node)));
            }
            Found::Alive => {}
            Found::Unclear if self.now >= until => {}
            Found::Unclear => {
                let pause = self.dice.between(5 * MS, SECOND);
                self.at(pause, Happening::Suspect { p, term, node, port, until });
            }
        }
    }

    /// A dead process's port is closed, since its tree is gone: a node that dials it is refused.
    pub(crate) fn port_closed(&mut self, p: usize) {
        self.tell(|| format!("p{p}: its port is closed"));
    }
}
