//! How soon newcomers get a place.

use super::*;

/// A job of the nodes a and b, and of others that come and go.
struct Job {
    scene: Scene,
    leader: Leader,
    revision: i64,
    now: Time,
    newcomers_warm_up: bool,
}

impl Job {
    /// Its nodes' workers start ahead, or not.
    fn new(mut scene: Scene, members_warm_up: bool, newcomers_warm_up: bool) -> Job {
        let running = json!({ "phase": "running", "round": 1, "warms_up": members_warm_up });
        scene.nodes = vec![("a", running.clone()), ("b", running)];
        let (leader, _) = scene.leader();
        let mut job = Job { scene, leader, revision: 20, now: NOW, newcomers_warm_up };
        job.settle();
        job
    }

    fn number(&self) -> u64 {
        self.leader.view().expect("a view").round.value.number
    }

    /// Every transaction that the leader wants succeeds.
    fn settle(&mut self) {
        while self.leader.is_busy() {
            self.revision += 1;
            written(&mut self.leader, self.now, self.revision);
        }
    }

    fn say(&mut self, name: &str, says: &Value) {
        self.revision += 1;
        let warms_up = self.newcomers_warm_up;
        let own = json!({ "incarnation": "1", "host": "h", "role": "default", "warms_up": warms_up });
        let record = merged(merged(about(name), &own), says);
        put(&mut self.leader, self.now, kv(self.scene.keys.node(&id(name)), record, self.revision));
        self.settle();
    }

    /// A round is formed; these nodes are in it, and run.
    fn runs(&mut self, nodes: &[&str], warm_up: bool) {
        let number = self.number();
        let master = json!({ "host": "h", "port": 2 });
        let says = |phase: &str| json!({ "phase": phase, "round": number, "master": master, "warms_up": warm_up });
        nodes.iter().for_each(|node| self.say(node, &says("waiting")));
        nodes.iter().for_each(|node| self.say(node, &says("running")));
        assert_eq!(self.leader.view().map(|view| view.roster.size()), Some(nodes.len()));
    }

    /// Seconds from a newcomer's arrival until a round is formed for it.
    fn comes(&mut self, name: &str) -> u64 {
        let (came, before) = (self.now, self.number());
        self.say(name, &json!({ "phase": "waiting", "master": { "host": "h", "port": 2 } }));
        for _ in 0..100 {
            if self.number() > before {
                return self.now.since(came).as_secs();
            }
            self.now = self.leader.deadline().expect("a deadline");
            self.leader.step(self.now, LeaderInput::Tick);
            self.settle();
        }
        panic!("{name} gets no place");
    }
}

#[test]
fn growth_is_quick_at_first_and_then_as_frequent_as_it_is_cheap() {
    // Given a node that comes, fills the last place, and dies after a second, again and again
    for (warm_up, waits) in [
        // two at once, and then a round must be old; a minute gives one back
        (false, [(1, 0), (1, 0), (1, 4), (60, 0), (1, 0), (1, 4)]),
        // two at once, and then one in five seconds
        (true, [(1, 0), (1, 0), (1, 1), (1, 3), (3, 1), (30, 0)]),
    ] {
        let mut scene = Scene::new();
        (scene.most, scene.min_round_time_ms) = (3, 5000);
        let mut job = Job::new(scene, warm_up, warm_up);
        for (turn, (pause, waits)) in waits.into_iter().enumerate() {
            job.now = job.now + Duration::from_secs(pause);
            let flaps = format!("c{turn}");
            assert_eq!(job.comes(&flaps), waits, "{warm_up}, growth {turn}");
            job.runs(&["a", "b", &flaps], warm_up);
            // its loss is acted on at once
            job.now = job.now + Duration::from_secs(1);
            let before = job.number();
            job.leader.step(job.now, LeaderInput::Dead(id(&flaps)));
            job.settle();
            assert_eq!(job.number(), before + 1);
            job.runs(&["a", "b"], warm_up);
        }
    }
}

#[test]
fn newcomers_are_gathered_unless_growth_is_cheap() {
    for (members_warm_up, newcomer_warms_up, policy, waits) in [
        (true, true, "failures", 0),
        (false, true, "failures", 4),
        (true, false, "failures", 4),
        // each growth costs a restart
        (true, true, "all", 4),
    ] {
        let mut scene = Scene::new();
        (scene.most, scene.last_call_ms, scene.policy) = (9, 4000, policy);
        let mut job = Job::new(scene, members_warm_up, newcomer_warms_up);
        assert_eq!(job.comes("c"), waits, "{members_warm_up} {newcomer_warms_up} {policy}");
    }
}

#[test]
fn no_node_is_admitted_once_the_training_is_over() {
    let mut job = Job::new(Scene::new(), false, false);
    let says = |finished: bool| json!({ "phase": "running", "round": 1, "finished": finished });
    job.say("a", &says(true));
    job.say("c", &json!({ "phase": "waiting", "master": { "host": "h", "port": 2 } }));
    job.now = job.now + Duration::from_secs(3600);
    job.leader.step(job.now, LeaderInput::Tick);
    job.settle();
    assert_eq!(job.number(), 1);

    // Until another training of the same script begins
    job.say("a", &says(false));
    assert_eq!(job.number(), 2);
}
