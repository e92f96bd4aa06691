//! PostgreSQL, asked by psql and pgbench.

use std::fs;
use std::path::PathBuf;

use adit_tests::bed::{Bed, Pod, Spawned, wait_for};
use anyhow::Context;

use crate::world::{LONG, assert_tunnelled, folder, text, tool, world};

/// The user that the package makes for it; as root it refuses to run.
const USER: &str = "postgres";

/// Its standard port.
const PORT: u16 = 5432;

/// The folder of the server's programs, which the package keeps off the search path.
fn programs() -> anyhow::Result<PathBuf> {
    let versions = fs::read_dir("/usr/lib/postgresql").context("PostgreSQL is not installed")?;
    let programs = versions.flatten().map(|version| version.path().join("bin"));
    programs
        .filter(|path| path.join("initdb").is_file())
        .max()
        .context("no initdb below /usr/lib/postgresql")
}

/// As the package's user.
fn as_user(program: &str) -> [&str; 7] {
    ["--reuid", USER, "--regid", USER, "--init-groups", "--", program]
}

/// A cluster which `client` alone may enter, by the address that the server sees.
fn start(bed: &Bed, client: &Pod) -> anyhow::Result<Spawned> {
    let server = bed.pod("server");
    let dir = folder(bed, "postgres", USER)?;
    let [data, initdb, postgres] = [
        dir.join("data"),
        programs()?.join("initdb"),
        programs()?.join("postgres"),
    ];
    let how = [
        "--pgdata",
        text(&data),
        "--no-sync",
        "--no-locale",
        "--encoding",
        "UTF8",
        "--username",
        USER,
    ];
    tool("setpriv", &[&as_user(text(&initdb))[..], &how].concat())?;
    fs::write(
        data.join("pg_hba.conf"),
        format!("host all all {}/32 trust\n", client.v4()),
    )?;
    let how = ["-D", text(&data), "-k", text(&dir), "-c", "listen_addresses=*"];
    let postgres = server.spawn_command("setpriv", &[&as_user(text(&postgres))[..], &how].concat())?;
    server.wait_for_listener(PORT, LONG)?;
    let host = server.v4().to_string();
    // It listens before it has recovered.
    wait_for("PostgreSQL to be ready", LONG, || {
        Ok(client.output("pg_isready", &["-h", &host]).is_ok())
    })?;
    Ok(postgres)
}

fn query(pod: &Pod, server: &Pod, sql: &str) -> anyhow::Result<String> {
    let out = pod.output(
        "psql",
        &["-h", &server.v4().to_string(), "-U", USER, "-X", "-At", "-w", "-c", sql],
    )?;
    Ok(out.trim().to_owned())
}

#[test]
fn postgresql_admits_the_client_by_its_true_address_and_runs_pgbench() {
    let bed = world("postgres").start().unwrap();
    let (client, stranger, server) = (bed.pod("client"), bed.pod("stranger"), bed.pod("server"));
    let _postgres = start(&bed, client).unwrap();

    let seen = "select client_addr from pg_stat_activity where pid = pg_backend_pid()";
    assert_eq!(query(client, server, seen).unwrap(), client.v4().to_string());
    // The server turns away who does not come from the client's address, also its own pod's loopback.
    let refused = query(stranger, server, "select 1").unwrap_err().to_string();
    let reason = format!("no pg_hba.conf entry for host \"{}\"", stranger.v4());
    assert!(refused.contains(&reason), "{refused}");
    let loopback = server.output("psql", &["-h", "127.0.0.1", "-U", USER, "-w", "-c", "select 1"]);
    let refused = loopback.unwrap_err().to_string();
    assert!(
        refused.contains("no pg_hba.conf entry for host \"127.0.0.1\""),
        "{refused}"
    );

    let host = server.v4().to_string();
    let to = ["-h", host.as_str(), "-U", USER, "postgres"];
    client
        .output("pgbench", &[&["-i", "-s", "2"], &to[..]].concat())
        .unwrap();
    let run = client
        .output("pgbench", &[&["-c", "8", "-j", "2", "-t", "50"], &to[..]].concat())
        .unwrap();
    assert!(
        run.contains("number of transactions actually processed: 400/400"),
        "{run}"
    );
    assert!(run.contains("number of failed transactions: 0 "), "{run}");
    // A connection per transaction.
    let run = client
        .output("pgbench", &[&["-C", "-S", "-n", "-c", "4", "-t", "25"], &to[..]].concat())
        .unwrap();
    assert!(
        run.contains("number of transactions actually processed: 100/100"),
        "{run}"
    );
    assert_eq!(
        query(client, server, "select count(*) from pgbench_history").unwrap(),
        "400"
    );
    assert_tunnelled(&bed, client, server, server.at(PORT));
}
