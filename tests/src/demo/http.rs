//! A web server and a client that know nothing of Adit: nginx and curl, or small ones of the demo's own.

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, ensure};
use sha2::{Digest, Sha256};

use super::report::Report;
use super::world::{SOON, World};
use crate::bed::Stage;
use crate::net::listen;

/// The server's port; port 81 of the service leads to it.
const PORT: u16 = 8081;
/// A file of some size.
const LENGTH: usize = 32 << 20;
const NAME: &str = "file";

/// Fetches a file over HTTP from the other node.
pub(super) fn show(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let folder = world.bed.dir().join("www");
    fs::create_dir_all(&folder)?;
    let content: Vec<u8> = (0..LENGTH).map(|index| ((index * 131) >> 7) as u8).collect();
    fs::write(folder.join(NAME), &content)?;
    let url = format!("http://{}/{NAME}", world.bed.service("shop/web").at(81));
    let (client, server) = (world.pod("cart"), world.pod("web"));
    let begin;
    let (who, status, body);
    if is_there("nginx") && is_there("curl") {
        let configuration = folder.join("nginx.conf");
        fs::write(&configuration, nginx_configuration(&folder))?;
        let path = configuration.display().to_string();
        let _nginx = server.spawn_command("nginx", &["-p", &folder.display().to_string(), "-c", &path])?;
        server.wait_for_listener(PORT, SOON)?;
        let file = folder.join("fetched");
        let target = file.display().to_string();
        begin = Instant::now();
        status = client.output("curl", &["-sS", "-m", "10", "-o", &target, "-w", "%{http_code}", &url])?;
        body = fs::read(&file).context("read what curl fetched")?;
        who = format!("curl in pod cart fetches {url} from nginx in pod web");
    } else {
        let for_server = content.clone();
        let _server = server.serve(|stage| serve(stage, PORT, &for_server))?;
        let address = world.bed.service("shop/web").at(81);
        begin = Instant::now();
        let answer = client.run(|| fetch(address))?;
        (status, body) = (answer.0, content.clone());
        ensure!(answer.1 == digest(&content), "the file arrived changed");
        who = format!(
            "a small HTTP client in pod cart fetches {url} from a small server in pod web (no nginx or curl here)"
        );
    }
    let took = begin.elapsed();
    report.say(who);
    report.say(format!(
        "status {status}, {} bytes in {:.0} ms, SHA-256 {}",
        body.len(),
        took.as_secs_f64() * 1e3,
        &digest(&body)[..16]
    ));
    report.check(
        "HTTP works unmodified across the nodes",
        status == "200" && digest(&body) == digest(&content),
        format!("{} MiB, the same SHA-256 as on the server", body.len() >> 20),
    );
    Ok(())
}

fn is_there(program: &str) -> bool {
    // Both answer -V (nginx on standard error) and end.
    let mut command = Command::new(program);
    command
        .arg("-V")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command.status().is_ok()
}

fn nginx_configuration(folder: &Path) -> String {
    let folder = folder.display();
    format!(
        "daemon off;
user root;
worker_processes 1;
pid {folder}/nginx.pid;
error_log stderr;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/t1;
    proxy_temp_path {folder}/t2;
    fastcgi_temp_path {folder}/t3;
    uwsgi_temp_path {folder}/t4;
    scgi_temp_path {folder}/t5;
    server {{ listen {PORT}; root {folder}; }}
}}
"
    )
}

/// Answers every request with the same content, for ever.
pub(super) fn serve(stage: &Stage, port: u16, content: &[u8]) -> anyhow::Result<()> {
    let listener = listen(("::", port))?;
    stage.reached(())?;
    for stream in listener.incoming().flatten() {
        // A client that is gone has told of it itself.
        let _ = answer(stream, content);
    }
    Ok(())
}

fn answer(mut stream: TcpStream, content: &[u8]) -> std::io::Result<()> {
    let mut request = Vec::new();
    let mut buffer = [0; 1024];
    while !request.ends_with(b"\r\n\r\n") {
        match stream.read(&mut buffer)? {
            0 => return Ok(()),
            count => request.extend_from_slice(&buffer[..count]),
        }
    }
    write!(
        stream,
        "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        content.len()
    )?;
    stream.write_all(content)
}

/// The status and the SHA-256 of what the server sent.
fn fetch(server: SocketAddr) -> anyhow::Result<(String, String)> {
    let mut stream = TcpStream::connect(server)?;
    write!(
        stream,
        "GET /{NAME} HTTP/1.1\r\nHost: {server}\r\nConnection: close\r\n\r\n"
    )?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    let end = answer
        .windows(4)
        .position(|window| window == b"\r\n\r\n")
        .context("an answer without a head")?;
    let head = String::from_utf8_lossy(&answer[..end]).into_owned();
    let status = head.split(' ').nth(1).context("an answer without a status")?;
    Ok((status.to_owned(), digest(&answer[end + 4..])))
}

fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}
