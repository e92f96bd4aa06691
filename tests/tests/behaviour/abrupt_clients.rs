//! Clients that connect and vanish at once do no harm.

use std::time::Duration;

use adit_tests::bed::wait_for;
use adit_tests::net;

use crate::world::{LONG, PORT, ask, echo, world};

#[test]
fn thousands_of_connections_that_are_reset_at_once_leave_the_proxies_alive_and_clean() {
    const COUNT: usize = 2_000;
    let bed = world("abrupt").start().unwrap();
    let (client, server, outsider) = (bed.pod("client"), bed.pod("server"), bed.pod("outsider"));
    let _servers = [echo(server, PORT), echo(bed.pod("neighbour"), PORT)];
    ask(client, server.at(PORT));
    ask(outsider, server.at(PORT));
    let before: Vec<usize> = bed.nodes().iter().map(|node| node.open_files().unwrap()).collect();
    let lines_before: Vec<usize> = bed
        .nodes()
        .iter()
        .map(|node| node.log().text().lines().count())
        .collect();

    // To each of the listeners: the pod's own, the tunnel's, the one for plaintext.
    let cases = [
        (client, server.at(PORT)),
        (client, bed.pod("neighbour").at(PORT)),
        (outsider, server.at(PORT)),
        (outsider, server.at(15_008)),
    ];
    let running: Vec<_> = cases
        .into_iter()
        .map(|(from, to)| {
            from.spawn(move || {
                for _ in 0..COUNT {
                    if let Ok(stream) = net::connect(to) {
                        net::reset(stream)?;
                    }
                }
                Ok(())
            })
            .unwrap()
        })
        .collect();
    for from in running {
        from.join(LONG).unwrap();
    }
    for (index, node) in bed.nodes().iter().enumerate() {
        assert!(node.is_running(), "the proxy of {} has died", node.name());
        // Idle tunnels stay open for a while, one for each hundred connections that were open at once.
        let what = format!("the descriptors of {} to return to {}", node.name(), before[index]);
        wait_for(&what, Duration::from_secs(8), || {
            Ok(node.open_files()? <= before[index] + 40)
        })
        .unwrap();
        let text = node.log().text();
        assert!(!text.contains("panicked"), "{}", node.name());
        let other = text
            .lines()
            .skip(lines_before[index])
            .filter(|line| !line.contains(" access "))
            .count();
        assert!(
            other < 100,
            "{other} lines of other kinds in the log of {}",
            node.name()
        );
    }
    ask(client, server.at(PORT));
    ask(outsider, server.at6(PORT));
}
