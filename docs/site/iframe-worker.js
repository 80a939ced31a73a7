// Browsers refuse to start a worker from a file. If the site is opened as files, this script runs
// the worker of the search in a hidden frame instead.
if (location.protocol === "file:") {
  class FrameWorker extends EventTarget {
    constructor(url) {
      super()
      this.queue = []
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.appendChild(this.frame)
      addEventListener("message", event => {
        if (event.source !== this.frame.contentWindow) return
        const copy = new MessageEvent("message", { data: event.data })
        this.dispatchEvent(copy)
        if (this.onmessage) this.onmessage(copy)
      })
      this.frame.onload = () => {
        const waiting = this.queue
        this.queue = null
        waiting.forEach(data => this.postMessage(data))
      }
      // The worker sends to the page instead of to its own frame.
      this.frame.srcdoc =
        "<script>postMessage = data => parent.postMessage(data, '*')</script>" +
        `<script src="${url}"></script>`
    }

    postMessage(data) {
      if (this.queue) this.queue.push(data)
      else this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }))
    }

    terminate() {
      this.frame.remove()
    }
  }
  window.Worker = FrameWorker
}
