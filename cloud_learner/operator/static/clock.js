// The gateway's clock as this page knows it. Pure: no page, no network.

const WINDOW_MS = 30000; // measurements older than one to two of these are forgotten: clocks drift apart

/**
 * Each message says when the gateway sent it, and takes a while: so the gateway is ahead by no less than the largest
 * difference that was seen. A time that is told by it is never later than it was.
 */
export class GatewayClock {
  constructor() {
    this.forget();
  }

  /** Another connection: perhaps another gateway. */
  forget() {
    this.ahead_ms = []; // of this window, and of the one before
    this.window_ms = 0;
  }

  /** A message came at `now_ms` that the gateway sent at `gateway_ms`. */
  measure(gateway_ms, now_ms) {
    const ahead_ms = gateway_ms - now_ms;
    if (!this.ahead_ms.length || now_ms - this.window_ms >= WINDOW_MS) {
      this.ahead_ms = [ahead_ms, ...this.ahead_ms.slice(0, 1)];
      this.window_ms = now_ms;
    } else {
      this.ahead_ms[0] = Math.max(this.ahead_ms[0], ahead_ms);
    }
  }

  /** What the gateway's clock showed at `time_ms` of this page's; 0 while nothing was measured. */
  at(time_ms) {
    return this.ahead_ms.length ? time_ms + Math.max(...this.ahead_ms) : 0;
  }
}
