//! nginx, asked by curl.

use std::fs;
use std::path::Path;

use adit_tests::bed::{Bed, Pod, Spawned};

use crate::world::{LONG, assert_tunnelled, digest_of_output, folder, noise_file, text, tool, world};

const MEBIBYTES: u64 = 200;

/// HTTP/2 without TLS, which the packaged site does not have.
const H2C: u16 = 8082;

/// Debian's configuration with the paths of its files moved into `dir`, and its site with HTTP/2 added.
fn configuration(dir: &Path) -> anyhow::Result<()> {
    let dir_text = text(dir);
    let main = fs::read_to_string("/etc/nginx/nginx.conf")?
        .replace("/run/nginx.pid", &format!("{dir_text}/nginx.pid"))
        .replace("/var/log/nginx/", &format!("{dir_text}/"))
        .replace("/etc/nginx/sites-enabled/*", &format!("{dir_text}/site.conf"));
    fs::write(dir.join("nginx.conf"), main)?;
    let site = fs::read_to_string("/etc/nginx/sites-available/default")?
        .replace("root /var/www/html", &format!("root {dir_text}/html"));
    let http2 = format!(
        "
        server {{
            listen 443 ssl http2 default_server;
            listen [::]:443 ssl http2 default_server;
            listen {H2C} http2 default_server;
            ssl_certificate {dir_text}/site.pem;
            ssl_certificate_key {dir_text}/site.key;
            root {dir_text}/html;
        }}
        "
    );
    fs::write(dir.join("site.conf"), site + &http2)?;
    Ok(())
}

/// A certificate of the site's own, which has nothing to do with the mesh.
fn certificate(dir: &Path, server: &Pod) -> anyhow::Result<()> {
    let names = format!("subjectAltName=IP:{}", server.v4());
    let [key, certificate] = ["site.key", "site.pem"].map(|name| dir.join(name));
    let how = [
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-subj",
        "/CN=site",
    ];
    let what = [
        "-days",
        "2",
        "-addext",
        &names,
        "-keyout",
        text(&key),
        "-out",
        text(&certificate),
    ];
    tool("openssl", &[&how[..], &what].concat())?;
    Ok(())
}

fn start(bed: &Bed, dir: &Path) -> anyhow::Result<Spawned> {
    let server = bed.pod("server");
    configuration(dir)?;
    certificate(dir, server)?;
    let config = dir.join("nginx.conf");
    let nginx = server.spawn_command("nginx", &["-c", text(&config), "-g", "daemon off;"])?;
    for port in [80, 443, H2C] {
        server.wait_for_listener(port, LONG)?;
    }
    Ok(nginx)
}

#[test]
fn nginx_serves_a_large_file_to_curl_over_every_version_of_http() {
    let bed = world("nginx").start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let dir = folder(&bed, "nginx", "root").unwrap();
    fs::create_dir(dir.join("html")).unwrap();
    let file = noise_file(&dir.join("html/large"), MEBIBYTES).unwrap();
    let _nginx = start(&bed, &dir).unwrap();

    let trust = dir.join("site.pem");
    let cases: [(&str, u16, &str, &[&str]); 3] = [
        ("http", 80, "HTTP/1.1", &["--http1.1"]),
        ("https", 443, "HTTP/2.0", &["--http2", "--cacert", text(&trust)]),
        ("http", H2C, "HTTP/2.0", &["--http2-prior-knowledge"]),
    ];
    for (scheme, port, version, arguments) in cases {
        let url = format!("{scheme}://{}/large", server.at(port));
        let mut curl = client.command("curl");
        curl.args(["--silent", "--show-error", "--fail", "--max-time", "60"])
            .args(arguments)
            .arg(&url);
        assert_eq!(digest_of_output(&mut curl).unwrap(), file, "{url}");
        let line = assert_tunnelled(&bed, client, server, server.at(port));
        assert!(line.number("bytes_received") >= MEBIBYTES << 20, "{url}: {line:?}");

        let log = fs::read_to_string(dir.join("access.log")).unwrap();
        let entry = log.lines().last().unwrap_or_default();
        assert!(
            entry.starts_with(&format!("{} - -", client.v4())),
            "the client that nginx saw: {entry}"
        );
        assert!(
            entry.contains(&format!("\"GET /large {version}\" 200 {}", MEBIBYTES << 20)),
            "{entry}"
        );
    }
}

#[test]
fn curl_makes_many_requests_on_one_connection_and_on_many() {
    const REQUESTS: usize = 100;
    let bed = world("nginx requests").start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let dir = folder(&bed, "nginx", "root").unwrap();
    fs::create_dir(dir.join("html")).unwrap();
    fs::write(dir.join("html/small"), "small\n").unwrap();
    let _nginx = start(&bed, &dir).unwrap();

    // One connection, then one per request.
    for (arguments, connections) in [(&[][..], 1), (&["--header", "connection: close"][..], REQUESTS)] {
        let url = format!("http://{}/small?[1-{REQUESTS}]", server.at(80));
        let common = [
            "--silent",
            "--show-error",
            "--fail",
            "--max-time",
            "20",
            "--write-out",
            "%{num_connects}\n",
        ];
        let out = client
            .output("curl", &[&common[..], arguments, &[url.as_str()]].concat())
            .unwrap();
        let (bodies, connects): (Vec<&str>, Vec<&str>) = out.lines().partition(|line| *line == "small");
        assert_eq!(bodies.len(), REQUESTS, "{out}");
        let connects: usize = connects.iter().map(|number| number.parse::<usize>().unwrap()).sum();
        assert_eq!(connects, connections);
    }
    // As a browser would: several at once.
    let urls = format!("http://{}/small?[1-{REQUESTS}]", server.at(80));
    let parallel = [
        "--silent",
        "--show-error",
        "--fail",
        "--parallel",
        "--parallel-immediate",
        "--parallel-max",
        "20",
    ];
    let out = client
        .output("curl", &[&parallel[..], &[urls.as_str()]].concat())
        .unwrap();
    assert_eq!(out, "small\n".repeat(REQUESTS));
    let log = fs::read_to_string(dir.join("access.log")).unwrap();
    assert_eq!(log.lines().count(), 3 * REQUESTS);
    let seen = format!("{} ", client.v4());
    assert!(log.lines().all(|line| line.starts_with(&seen)), "{log}");
    assert_tunnelled(&bed, client, server, server.at(80));
}
