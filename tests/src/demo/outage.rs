//! A proxy that is killed, and one that is replaced.

use std::io::Write;
use std::time::{Duration, Instant};

use super::report::Report;
use super::world::{PORT, SOON, World};
use crate::bed::{Pod, Running, Stage, wait_for};
use crate::net::{self, Attempt, Outcome, Steady};

/// A text that must not leave pod cart while its proxy is away.
const MARKER: &str = "nothing-leaves-while-closed-5d20";

/// How often the proxy is replaced.
const UPGRADES: usize = 2;

/// What each server is loaded with meanwhile.
pub(super) const LOAD: Steady = Steady {
    makers: 2,
    maker_pause: Duration::from_millis(10),
    talkers: 10,
    talker_pause: Duration::from_millis(10),
};

pub(super) fn echo_in(world: &World, pods: &[&str]) -> anyhow::Result<Vec<Running<()>>> {
    let serve = |stage: &Stage| net::echo_forever(stage, ("::", PORT));
    pods.iter().map(|pod| world.pod(pod).serve(serve)).collect()
}

fn is_answered(client: &Pod, server: &Pod) -> bool {
    let to = server.at(PORT);
    let seen = client.run(|| net::ask(to, "hello"));
    seen.is_ok_and(|seen| seen.text == "hello")
}

/// How a client is told no: it tries, and offers the marker to whoever answers.
fn attempt_with_marker(client: &Pod, server: &Pod) -> anyhow::Result<Attempt> {
    let to = server.at(PORT);
    client.run(|| {
        if let Ok(mut stream) = net::connect(to) {
            // Refused or not: that is told by what comes.
            let _ = stream.write_all(MARKER.as_bytes());
        }
        net::attempt(to)
    })
}

pub(super) fn killed(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let pod = |name: &str| world.pod(name);
    let node = world.node_of("cart");
    let _servers = echo_in(world, &["cart", "billing", "web", "legacy"])?;
    let to = pod("billing").at(PORT);
    let mut open = pod("cart").spawn_staged(move |stage| {
        let mut stream = net::connect(to)?;
        stage.reached(())?;
        stage.hold()?;
        stream.write_all(b"still here")?;
        net::read_text(&mut stream, 10)
    })?;
    open.stage::<()>(SOON)?;
    let capture = world.bed.capture_link()?;
    let pid = node.pid().unwrap_or_default();
    node.kill();
    report.say(format!(
        "kill -9 {pid}: the proxy of {} is gone, its programs are not",
        node.name()
    ));

    let out = attempt_with_marker(pod("cart"), pod("web"))?;
    let inward = attempt_with_marker(pod("web"), pod("cart"))?;
    let found = capture.count(MARKER);
    report.check(
        "what needs the proxy is refused, both ways",
        out.was_refused() && inward.was_refused(),
        format!(
            "cart -> web: {} after {} ms; web -> cart: {} after {} ms",
            outcome(&out),
            out.took_ms,
            outcome(&inward),
            inward.took_ms
        ),
    );
    report.check(
        "nothing leaks in plaintext",
        found == 0 && capture.is_complete(),
        format!(
            "{found} occurrences of the text offered in {} packets on the link",
            capture.packets()
        ),
    );
    drop(capture);
    open.proceed()?;
    let goes_on = open.join(SOON)?;
    let new = is_answered(pod("cart"), pod("billing"));
    let outside = is_answered(pod("cart"), pod("legacy"));
    report.check(
        "what the kernel has a verdict for goes on without the proxy",
        goes_on == "still here" && new && outside,
        "an open connection of cart to billing, a new one, and one to legacy outside the mesh",
    );
    report.check(
        "pods outside the mesh do not notice",
        is_answered(pod("bare"), pod("legacy")),
        "bare -> legacy, between the nodes",
    );
    let begin = Instant::now();
    node.start()?;
    // The other node may be slow to see that its tunnel has ended.
    wait_for("the way in", SOON, || Ok(is_answered(pod("web"), pod("cart"))))?;
    report.check(
        "the next proxy takes up what is pinned, and all works again",
        is_answered(pod("cart"), pod("web")) && is_answered(pod("cart"), pod("billing")),
        format!("{} ms after its start", begin.elapsed().as_millis()),
    );
    Ok(())
}

fn outcome(attempt: &Attempt) -> String {
    let name = |errno: i32| format!("{:?}", nix::errno::Errno::from_raw(errno));
    match (attempt.connect, attempt.ending) {
        (Some(errno), _) => name(errno),
        (None, Some(net::Ending::Errno(errno))) => format!("connected, then {}", name(errno)),
        (None, ending) => format!("connected, then {ending:?}"),
    }
}

pub(super) fn replaced(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let pod = |name: &str| world.pod(name);
    let node = world.node_of("cart");
    let _servers = echo_in(world, &["cart", "billing", "web", "legacy"])?;
    let at = |name: &str| pod(name).at(PORT);
    let begin = |from: &str, servers: Vec<_>| pod(from).serve(move |stage| LOAD.run(stage, &servers));
    let loads = [
        (
            "cart to web (tunnel), billing and legacy (direct)",
            begin("cart", vec![at("web"), at("billing"), at("legacy")])?,
        ),
        ("web to cart (tunnel)", begin("web", vec![at("cart")])?),
        ("legacy to cart (plaintext)", begin("legacy", vec![at("cart")])?),
    ];
    let started = Instant::now();
    std::thread::sleep(Duration::from_millis(300));
    for _ in 0..UPGRADES {
        let (old, begin) = (node.pid().unwrap_or_default(), Instant::now());
        node.upgrade(&[])?;
        report.say(format!(
            "a second adit node on {} takes over from pid {old}: pid {}, {} ms after its start",
            node.name(),
            node.pid().unwrap_or_default(),
            begin.elapsed().as_millis()
        ));
        std::thread::sleep(Duration::from_millis(500));
    }
    let mut total = Outcome::default();
    for (what, running) in loads {
        running.proceed()?;
        let outcome: Outcome = running.join(2 * SOON)?;
        report.say(format!(
            "{what}: {} connections made, {} exchanges on {} that stayed open, {} losses",
            outcome.made,
            outcome.exchanges,
            LOAD.talkers,
            outcome.losses.len()
        ));
        outcome.losses.iter().take(3).for_each(|loss| report.quote(loss));
        total.made += outcome.made;
        total.exchanges += outcome.exchanges;
        total.losses.extend(outcome.losses);
    }
    let seconds = started.elapsed().as_secs_f64();
    report.check(
        "upgrades under load lose nothing",
        total.losses.is_empty() && total.made > 0 && total.exchanges > 0,
        format!(
            "{UPGRADES} upgrades, {} new connections ({:.0} a second), {} exchanges, {} failed, reset or changed",
            total.made,
            total.made as f64 / seconds,
            total.exchanges,
            total.losses.len()
        ),
    );
    node.wait_left(2 * SOON)?;
    report.check(
        "the predecessors end once nothing of theirs is open",
        node.is_running(),
        format!("{UPGRADES} have ended by themselves"),
    );
    Ok(())
}
