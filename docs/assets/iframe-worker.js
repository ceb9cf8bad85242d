/* Browsers start no workers for pages that are opened from a disk. There, the search runs in a hidden frame. */
"use strict";

if (location.protocol === "file:") {
  // The search of the theme looks for this name, and then for the address of its script in the frame's document.
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.scope = frame.contentWindow;
      this.scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.scope.importScripts = async (...addresses) => {
        for (const each of addresses) await this.load(each);
      };
      this.loaded = this.load(address);
    }

    load(address) {
      return new Promise((resolve, reject) => {
        const script = this.scope.document.createElement("script");
        Object.assign(script, { src: address, onload: resolve, onerror: reject });
        this.scope.document.body.append(script);
      });
    }

    async postMessage(data) {
      await this.loaded;
      this.scope.dispatchEvent(new MessageEvent("message", { data }));
    }

    terminate() {
      this.scope.frameElement.remove();
    }
  };
}
