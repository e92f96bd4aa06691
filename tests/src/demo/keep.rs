//! Leaving the demo up, for a look around.

use std::io::{ErrorKind, Read};
use std::time::Duration;

use super::http;
use super::report::Report;
use super::world::{PORT, World};
use crate::bed::process::ADMIN;
use crate::sys::check_interrupt;

/// Prints commands to try and waits for Enter or Ctrl-C, with servers in pods `web` and `billing`.
pub(super) fn wait(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let (cart, billing, web) = (world.pod("cart"), world.pod("billing"), world.pod("web"));
    let _servers = [
        web.serve(|stage| http::serve(stage, PORT, b"hello from web\n"))?,
        billing.serve(|stage| http::serve(stage, PORT, b"hello from billing\n"))?,
    ];
    let service = world.bed.service("shop/web").at(80);
    // A shell is a pod's when it is in the pod's cgroup and network namespace.
    let inside = |pod: &str, command: &str| {
        let pod = world.pod(pod);
        format!(
            "sh -c 'echo $$ > {}/cgroup.procs; exec nsenter --net={} {command}'",
            pod.cgroup().display(),
            pod.netns().display()
        )
    };
    report.heading("Look around (as root, in another terminal)");
    report.say("ask pod web from pod cart, which may, and from pod billing, which may not:");
    report.quote(inside("cart", &format!("curl -si http://{service}/")));
    report.quote(inside("billing", &format!("curl -si http://{service}/")));
    report.say("ask pod billing from pod cart, on the same node: directly, without the proxy:");
    report.quote(inside("cart", &format!("curl -si http://{}/", billing.at(PORT))));
    report.say("a shell in pod cart:");
    report.quote(inside("cart", "bash"));
    for node in world.bed.nodes() {
        let enter = format!("nsenter --net={}", node.netns().display());
        report.say(format!(
            "{}, whose proxy is pid {}: state, metrics, access log, the packets between the nodes:",
            node.name(),
            node.pid().unwrap_or_default()
        ));
        report.quote(format!("{enter} curl -s http://{ADMIN}/debug/state"));
        report.quote(format!("{enter} curl -s http://{ADMIN}/metrics"));
        report.quote(format!("tail -f {}", node.log().path().display()));
        report.quote(format!("{enter} tcpdump -ni wan0 -X"));
    }
    report.say("what both proxies read; a change takes effect within a second:");
    report.quote(world.bed.mesh_file().display().to_string());
    report.say(format!("cart has {}, web has {}", cart.v4(), web.v4()));
    report.say("Enter or Ctrl-C ends it and clears everything away.");
    loop {
        if check_interrupt().is_err() {
            return Ok(());
        }
        match std::io::stdin().read(&mut [0; 256]) {
            Ok(1..) => return Ok(()),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            // No terminal: only a signal ends it.
            Ok(0) | Err(_) => std::thread::sleep(Duration::from_millis(100)),
        }
    }
}
