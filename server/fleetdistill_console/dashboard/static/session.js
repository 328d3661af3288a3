// Shows the page for signing in once the session has ended: signed out elsewhere, or the dashboard restarted.
// Part of the page, not sent over its connection, because the session may end before the page has connected.
async function signInAgain() {
  const answer = await fetch(location.href).catch(() => null);
  if (answer?.status === 401) location.reload();
}
addEventListener("load", () => {
  if (window.socket) window.socket.io.on("reconnect_attempt", signInAgain);
  else signInAgain(); // the session ended while the scripts were loaded
});
