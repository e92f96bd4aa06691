//! Redis, asked by its own tools.

use adit_tests::bed::{Bed, Pod, Spawned, wait_for};
use adit_tests::net;

use crate::world::{LONG, assert_tunnelled, folder, output, text, world};

/// Its standard port.
const PORT: u16 = 6379;

/// Debian's configuration, with its files moved and listening to more than loopback.
fn start(bed: &Bed) -> anyhow::Result<Spawned> {
    let server = bed.pod("server");
    let dir = folder(bed, "redis", "root")?;
    let pid = dir.join("redis.pid");
    let files = ["--dir", text(&dir), "--pidfile", text(&pid), "--logfile", ""];
    let how = ["/etc/redis/redis.conf", "--daemonize", "no", "--bind", "*", "-::*"];
    let redis = server.spawn_command("redis-server", &[&how[..], &files].concat())?;
    server.wait_for_listener(PORT, LONG)?;
    wait_for("Redis to answer", LONG, || {
        let answer = output(server, "redis-cli", &["ping"]);
        Ok(answer.is_ok_and(|answer| answer.trim() == "PONG"))
    })?;
    Ok(redis)
}

fn ask(pod: &Pod, server: &Pod, question: &[&str]) -> anyhow::Result<String> {
    let host = server.v4().to_string();
    output(pod, "redis-cli", &[&["-h", host.as_str()], question].concat())
}

#[test]
fn redis_knows_its_client_and_runs_its_benchmark() {
    let bed = world("redis").start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _redis = start(&bed).unwrap();

    // As packaged it serves loopback only. It must not be made to believe that the mesh is its loopback.
    let to = server.at(PORT);
    let greeting = client.run(|| net::attempt(to)).unwrap().text;
    assert!(
        greeting.starts_with("-DENIED Redis is running in protected mode"),
        "{greeting}"
    );
    let changed = output(server, "redis-cli", &["config", "set", "protected-mode", "no"]).unwrap();
    assert_eq!(changed.trim(), "OK");

    let list = ask(client, server, &["client", "list"]).unwrap();
    let own = list
        .lines()
        .find(|line| line.contains("cmd=client"))
        .unwrap_or_else(|| panic!("{list}"));
    assert!(own.contains(&format!(" addr={}:", client.v4())), "{own}");
    assert!(own.contains(&format!(" laddr={} ", server.at(PORT))), "{own}");

    let host = server.v4().to_string();
    let run = [
        "-h",
        host.as_str(),
        "-c",
        "50",
        "-n",
        "5000",
        "-d",
        "1024",
        "-t",
        "set,get,lpush,lrange_100",
        "--csv",
    ];
    let table = output(client, "redis-benchmark", &run).unwrap();
    for test in ["SET", "GET", "LPUSH", "LRANGE_100 (first 100 elements)"] {
        assert!(table.contains(&format!("\n\"{test}\",")), "{table}");
    }
    let pipelined = [
        "-h",
        host.as_str(),
        "-n",
        "20000",
        "-P",
        "16",
        "-r",
        "1000",
        "-t",
        "set",
        "--csv",
    ];
    assert!(
        output(client, "redis-benchmark", &pipelined)
            .unwrap()
            .contains("\n\"SET\",")
    );
    let length: u64 = ask(client, server, &["llen", "mylist"])
        .unwrap()
        .trim()
        .parse()
        .unwrap();
    assert_eq!(length, 5000 + 5000, "what LPUSH and the preparation of LRANGE pushed");
    assert_tunnelled(&bed, client, server, server.at(PORT));
}
