/* Search in a folder that was opened by hand: browsers start no Worker from file://. This one runs its script in a hidden
   frame instead. The theme's search asks for the name IFrameWorker, and awaits importScripts there. */
class FileWorker extends EventTarget {
  constructor(url) {
    super();
    this.frame = document.createElement("iframe");
    this.frame.hidden = true;
    document.body.append(this.frame);
    const inside = this.frame.contentWindow;
    const load = (address) =>
      new Promise((resolve, reject) => {
        const script = inside.document.createElement("script");
        Object.assign(script, { src: address, onload: resolve, onerror: reject });
        inside.document.body.append(script);
      });
    inside.postMessage = (data) => {
      const event = new MessageEvent("message", { data });
      this.dispatchEvent(event);
      this.onmessage?.(event);
    };
    inside.importScripts = async (...addresses) => {
      for (const address of addresses) await load(address);
    };
    this.ready = load(new URL(url, location.href).href);
  }

  async postMessage(data) {
    await this.ready;
    this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) }));
  }

  terminate() {
    this.frame.remove();
  }
}

if (location.protocol === "file:") {
  window.IFrameWorker = FileWorker;
  window.Worker = FileWorker;
}
