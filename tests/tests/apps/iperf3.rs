//! iperf3, both ways.

use adit_tests::bed::{Pod, wait_for};
use serde_json::Value;

use crate::world::{LONG, SOON, assert_tunnelled, world};

/// Its standard port.
const PORT: u16 = 5201;

fn run(client: &Pod, server: &Pod, arguments: &[&str]) -> Value {
    let host = server.v4().to_string();
    let common = ["--client", host.as_str(), "--time", "1", "--json"];
    let report = client.output("iperf3", &[&common[..], arguments].concat()).unwrap();
    serde_json::from_str(&report).unwrap()
}

#[test]
fn iperf3_runs_in_both_directions_and_with_parallel_streams() {
    let bed = world("iperf3").start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let iperf3 = server.spawn_command("iperf3", &["--server", "--forceflush"]).unwrap();
    server.wait_for_listener(PORT, LONG).unwrap();

    let cases: [(&[&str], u64, &[&str]); 4] = [
        (&[], 1, &["sum"]),
        (&["--reverse"], 1, &["sum"]),
        (&["--parallel", "8"], 8, &["sum"]),
        (&["--bidir", "--parallel", "2"], 4, &["sum", "sum_bidir_reverse"]),
    ];
    for (arguments, streams, sums) in cases {
        let report = run(client, server, arguments);
        assert!(report["error"].is_null(), "{arguments:?}: {report}");
        let connected = report["start"]["connected"].as_array().unwrap();
        assert_eq!(connected.len() as u64, streams, "{arguments:?}");
        for stream in connected {
            assert_eq!(stream["local_host"], client.v4().to_string(), "{arguments:?}");
            assert_eq!(stream["remote_host"], server.v4().to_string(), "{arguments:?}");
        }
        for sum in sums {
            for way in ["sent", "received"] {
                let name = sum.replace("sum", &format!("sum_{way}"));
                let bytes = report["end"][&name]["bytes"].as_u64().unwrap_or(0);
                assert!(bytes > 0, "{arguments:?}: {name} is {}", report["end"][&name]);
            }
        }
    }
    let seen = format!("Accepted connection from {}", client.v4());
    wait_for("four greetings in the server's report", SOON, || {
        Ok(iperf3.log().text().matches(&seen).count() == 4)
    })
    .unwrap();
    assert_tunnelled(&bed, client, server, server.at(PORT));
}
